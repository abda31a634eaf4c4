"""Starts a process that does nothing until it is released, and ends if that never comes.

Between the start of a worker and the moment when the watchdog knows of it, the launcher may be killed. So what is
started is a shell that waits for a line on its standard input, and becomes the worker then; end of file means that the
launcher is gone.
"""

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from typing import IO

HOLD = ("/bin/sh", "-c", 'read -r go && exec "$@" </dev/null', "held")
"""Goes before the command of a process that is to wait for `GO`."""
GO = b"go\n"


async def start_held(
    argv: Sequence[str], env: Mapping[str, str], output: IO[bytes], pass_fds: Sequence[int] = ()
) -> asyncio.subprocess.Process:
    """The leader of a session of its own, with nothing to read; raises `OSError` when it cannot be started."""
    if shutil.which(argv[0], path=env.get("PATH", "")) is None:
        raise FileNotFoundError(f"there is no program {argv[0]}")
    return await asyncio.create_subprocess_exec(
        *(*HOLD, *argv),
        stdin=asyncio.subprocess.PIPE,
        stdout=output,
        stderr=asyncio.subprocess.STDOUT,
        env=dict(env),
        start_new_session=True,
        pass_fds=pass_fds,
    )


def release(process: asyncio.subprocess.Process) -> None:
    """It becomes what it was started for, under the same process id."""
    assert process.stdin is not None
    process.stdin.write(GO)
    process.stdin.close()
