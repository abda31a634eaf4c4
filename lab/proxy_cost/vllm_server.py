"""vLLM's own API server, unchanged, on an engine that costs nothing.

`python -m lab.proxy_cost.vllm_server {in-process|sockets} STEP_S ARGUMENTS OF VLLM'S SERVER`

`sockets` is what vLLM does: `AsyncMPClient` and an engine in another process. `in-process` has an engine in the place
of the client and leaves all of that out: nothing that serves several engines can be as cheap.

Relies on vLLM 0.32, checked by `tests/unit/lab/proxy_cost/test_vllm_internals.py`: `entry.main`, whose steps these
are; `run_server_worker` with a `client_config` that names the sockets of an engine managed by somebody else;
`EngineCoreClient.make_async_mp_client`, called once by `AsyncLLM.__init__`.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop
from vllm.entrypoints.launchers.api_server.entry import run_server_worker
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import setup_server
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.core_client import EngineCoreClient

from cluster.simulated.engine.vocabulary import word_tokens
from lab.proxy_cost.vllm_free_engine import FreeEngineClient

ENGINE_STOPS_WITHIN_S = 5.0


async def _serve(kind: str, step_s: str, args: argparse.Namespace) -> None:
    listen_address, listening = setup_server(args, reuse_port=False)
    with _engine(kind, step_s, args.model) as client_config:
        await run_server_worker(listen_address, listening, args, client_config)


@contextlib.contextmanager
def _engine(kind: str, step_s: str, model: str) -> Iterator[dict[str, Any] | None]:
    """What to tell vLLM about its engine; it is there while the context lasts."""
    if kind == "in-process":
        client = FreeEngineClient(word_tokens(Path(model)), float(step_s))
        EngineCoreClient.make_async_mp_client = staticmethod(lambda *_args, **_kwargs: client)
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="twinpool-lab-") as directory:
        addresses = [f"ipc://{directory}/{name}" for name in ("input", "output")]
        command = [sys.executable, "-m", "lab.proxy_cost.engine_process", *addresses, model, step_s]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            try:
                yield {"input_address": addresses[0], "output_address": addresses[1]}
            finally:
                assert process.stdin is not None
                process.stdin.close()
                try:
                    process.wait(ENGINE_STOPS_WITHIN_S)
                except subprocess.TimeoutExpired:
                    process.kill()


def main() -> None:
    parser = make_arg_parser(FlexibleArgumentParser(description=__doc__))
    args = parser.parse_args(sys.argv[3:])
    validate_parsed_serve_args(args)
    uvloop.run(_serve(sys.argv[1], sys.argv[2], args))


if __name__ == "__main__":
    main()
