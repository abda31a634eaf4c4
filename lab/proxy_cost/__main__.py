"""`python -m lab.proxy_cost`: what the API server costs in front of engines that cost nothing.

Starts, all at once, vLLM's own API server with an engine in another process over vLLM's own sockets, and with one in
its own process (no sockets and no frames at all: the hardest rival); `twinpool serve` on one simulated worker, and on
one prefill and one decode worker with a hand-over for every request; and vllm-router in front of the first, where it
is installed (extra `peers`). Behind sockets the engine is the same simulated one, which answers at once. Then each gets
the same closed loops in turn, again and again, until the time is up.

CPU is that of the process that clients talk to; what vllm-router leaves to the server behind it is shown beside it.
The table goes to stderr, the numbers as JSON to stdout.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from cluster.embedded_model import ensure_embedded_model
from lab.proxy_cost.arms import ROUTER, TWINPOOL_PD, VLLM, VLLM_ROUTED, arms
from lab.proxy_cost.client import WrongAnswer
from lab.proxy_cost.compare import compare
from lab.proxy_cost.run import measure, prompts
from lab.proxy_cost.table import table
from lab.proxy_cost.work import CELLS
from lab.server_process import ServerFailed


def _say(what: str) -> None:
    Console(stderr=True).print(f"[dim]{what}[/dim]")


def main() -> None:
    """Parses the command line and prints the report."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.proxy_cost",
        description=__doc__.partition(": ")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", help="directory with a model's configuration and tokenizer; the embedded one if not given"
    )
    parser.add_argument("--seconds", type=float, default=150.0, help="time for all of it; one round at least")
    parser.add_argument(
        "--step-ms",
        type=float,
        default=0.0,
        help="let engines wait so long before every token, so that servers keep up and each token is sent by itself",
    )
    parser.add_argument("--only", nargs="+", metavar="ARM", help=f"names of arms; {VLLM!r} is always among them")
    options = parser.parse_args()
    until_s = time.monotonic() + options.seconds
    model = options.model or str(asyncio.run(ensure_embedded_model(_say)))
    _say(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(prefix="twinpool-lab-") as name:
        directory = Path(name)
        chosen = arms(
            model, directory, options.step_ms / 1e3, with_pd=options.only is None or TWINPOOL_PD in options.only
        )
        if options.only is not None:
            chosen = [arm for arm in chosen if arm.name in {VLLM, *options.only}]
        if all(arm.name != VLLM_ROUTED for arm in chosen) and options.only is None:
            _say(f"{ROUTER} is not installed (extra `peers`) and is left out")
        _say(f"starting {', '.join(arm.name for arm in chosen)}")
        try:
            samples = measure(chosen, CELLS, prompts(Path(model)), directory, until_s, _say)
        except (ServerFailed, WrongAnswer) as error:
            sys.exit(str(error))
    rows = compare(samples, CELLS, [arm.name for arm in chosen], VLLM)
    Console(stderr=True, width=140).print(table(rows, VLLM))
    sys.stdout.write(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
