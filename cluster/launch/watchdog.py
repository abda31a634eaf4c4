"""Kills the workers' process groups when the launcher is gone, however it went.

The launcher starts this file by its path, in a session of its own, and keeps the only write end of its standard
input. Lines `+PGID` and `-PGID` say which groups are alive, `=PATH` which directory of sockets, settings and logs goes
with the launcher (none: `=`). End of file means that the launcher ended: normally there is nothing left to do then;
after a SIGKILL there is, and every group on the list is told to stop and killed after a grace time. A parent-death
signal would not do: it reaches a worker's host, but not its engine core and ranks.

Uses the standard library only, so that it can run with `-I -S` and costs almost nothing.
"""

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

COMMAND = (sys.executable, "-I", "-S", __file__)
DIRECTORY_PREFIX = "twinpool-"
GRACE_S = 3.0
_POLL_S = 0.02
# A killed process has to give back its memory before it is gone, and its resource tracker to clean up.
DEATH_S = 1.0


def told(sign: str, group: int) -> bytes:
    """The line that says of a group that it is alive, `+`, or not to be ended any more, `-`."""
    return f"{sign}{group}\n".encode()


def told_directory(path: Path | None) -> bytes:
    """The line that names the directory that goes with the launcher; None: none does."""
    return b"=" + (os.fsencode(path) if path is not None else b"") + b"\n"


def members(group: int) -> list[int]:
    """Living processes of a group or of the session that its leader opened; zombies do not count."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text(errors="replace")
        except OSError:  # ended meanwhile
            continue
        # pid (command) state ppid pgrp session ...; the command may hold spaces and parentheses.
        state, _, pgrp, session = text[text.rindex(")") + 2 :].split()[:4]
        if group in (int(pgrp), int(session)) and state not in "ZX":
            found.append(int(entry.name))
    return found


def signal_members(group: int, number: int) -> None:
    """Sends a signal to every living member of a group or its session."""
    for pid in members(group):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def ask_to_end(group: int) -> None:
    """SIGTERM, but SIGINT to the leader: to a worker's host SIGTERM means to finish everything first."""
    for pid in members(group):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT if pid == group else signal.SIGTERM)


def kill_computing(group: int) -> None:
    """SIGKILL to every member but Python's resource trackers.

    A tracker ends when those it tracks for are gone, and then removes the shared memory that they left behind.
    """
    for pid in members(group):
        if not _is_tracker(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def end_groups(groups: set[int], grace_s: float) -> None:
    """Asks all members to end, SIGKILL to those left after `grace_s`; returns when they are gone."""
    for group in groups:
        ask_to_end(group)
    _wait_until_empty(groups, grace_s)
    for group in groups:
        kill_computing(group)
    _wait_until_empty(groups, DEATH_S)
    for group in groups:
        signal_members(group, signal.SIGKILL)
    _wait_until_empty(groups, DEATH_S)


def _wait_until_empty(groups: set[int], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(members(group) for group in groups):
        time.sleep(_POLL_S)


def remove(directory: str) -> None:
    """What only this run needed; nothing else has such a name."""
    if Path(directory).name.startswith(DIRECTORY_PREFIX):
        shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    """Reads what there is until end of file, then ends what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    directory = ""
    for line in sys.stdin.buffer:
        sign, what = line[:1], line[1:].rstrip(b"\n")
        if sign == b"+":
            groups.add(int(what))
        elif sign == b"-":
            groups.discard(int(what))
        else:
            directory = os.fsdecode(what)
    end_groups(groups, GRACE_S)
    remove(directory)


if __name__ == "__main__":
    main()
