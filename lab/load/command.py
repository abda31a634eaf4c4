"""`twinpool lab load`: reads what is asked for, drives it, prints and writes what came of it."""

import asyncio
import json
import signal
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from io import RawIOBase
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from lab.load.arrivals import Process
from lab.load.client import Record, Target
from lab.load.drive import Load
from lab.load.plan import TRACE_CLASS, plan_sessions, replay, trace_work
from lab.load.prompts import NoTokenizer, Prompts, local_tokenizer, server_tokenizer
from lab.load.summary import Summary, summarize
from lab.load.table import tables
from lab.load.work import WorkClass, WorkError, parse_work
from lab.output_file import why_unwritable
from lab.traces.formats import TraceError, read_trace
from lab.traces.trace import Scaling, TraceRequest, scale

_EXIT_FAILED, _EXIT_USAGE, _EXIT_INTERRUPTED = 1, 2, 130
_MODELS_TIMEOUT_S = 10.0
_REFRESH_S = 0.5


@dataclass(frozen=True)
class LoadOptions:
    """The command line."""

    url: str
    work: Sequence[str]
    trace: Path | None
    scaling: Scaling
    ttft_s: float | None
    itl_s: float | None
    """Limits of a trace's requests."""
    seconds: float
    seed: int
    process: Process
    cv: float
    model: str
    api_key: str
    tokenizer: Path | None
    class_header: str
    timeout_s: float
    plain: bool
    """Send only what every OpenAI-compatible server knows."""
    jsonl_file: Path | None
    json_file: Path | None


def run_load(options: LoadOptions) -> int:
    """Returns the exit status: 1 when no request came whole, 130 after Ctrl-C."""
    errors = Console(stderr=True, highlight=False)
    try:
        trace = scale(read_trace(options.trace), options.scaling, options.seed) if options.trace else []
        classes = _classes(options, trace)
        if complaint := why_unwritable("--json", options.json_file):
            raise WorkError(complaint)
        url = options.url.rstrip("/").removesuffix("/v1")
        model = options.model or _first_model(url, options.api_key)
        encode = (
            local_tokenizer(options.tokenizer) if options.tokenizer else server_tokenizer(url, model, options.api_key)
        )
        if options.trace:
            sessions = replay(trace, TRACE_CLASS, options.seed)
        else:
            sessions = plan_sessions(classes, options.seconds, options.seed, options.process, options.cv)
        extra: dict[str, Any] = {} if options.plain else {"ignore_eos": True, "return_token_ids": True}
        target = Target(url, model, {"Authorization": f"Bearer {options.api_key}"}, extra, options.timeout_s)
        with errors.status(f"making {len(sessions)} prompts"):
            lines = options.jsonl_file.open("wb", buffering=0) if options.jsonl_file else None
            load = Load([target], sessions, Prompts(encode), partial(_write, lines), options.class_header)
    except (WorkError, TraceError, NoTokenizer, OSError) as error:
        errors.print(f"twinpool: {error}", style="red", soft_wrap=True, markup=False)
        return _EXIT_USAGE
    interrupted = asyncio.run(_drive(load, errors, len(sessions)))
    if lines is not None:
        lines.close()
    summary = summarize(classes, load.records, load.elapsed_s)
    Console(highlight=False).print(tables(summary))
    if options.json_file is not None:
        options.json_file.write_bytes(_report(options, classes, model, summary))
    if interrupted:
        return _EXIT_INTERRUPTED
    return 0 if summary.total.whole else _EXIT_FAILED


def _classes(options: LoadOptions, trace: Sequence[TraceRequest]) -> list[WorkClass]:
    classes = [parse_work(text) for text in options.work]
    if len({work.name for work in classes}) < len(classes):
        raise WorkError("two classes of requests have the same name")
    if bool(classes) == bool(options.trace):
        raise WorkError("give classes of requests with --work, or a trace with --trace, and not both")
    if not options.trace:
        return classes
    if not trace:
        raise WorkError(f"nothing is left of the trace {options.trace}: keep more of it")
    return [trace_work(trace, options.ttft_s, options.itl_s)]


def _write(lines: RawIOBase | None, record: Record) -> None:
    """At once, so that a run that is killed leaves what it had measured."""
    if lines is not None:
        lines.write(msgspec.json.encode(record) + b"\n")


async def _drive(load: Load, console: Console, num_sessions: int) -> bool:
    """True if a signal cut it off."""
    driving = asyncio.create_task(load.run())
    interrupted = False

    def stop() -> None:
        nonlocal interrupted
        interrupted = True
        driving.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    with Live(console=console, transient=True, auto_refresh=False) as live:
        while not driving.done():
            live.update(_progress(load, num_sessions), refresh=True)
            await asyncio.wait((driving,), timeout=_REFRESH_S)
    if not interrupted:
        driving.result()
    return interrupted


def _progress(load: Load, num_sessions: int) -> Text:
    failed = sum(bool(record.error) for record in load.records)
    done = len(load.records)
    recent: list[Record] = load.records[-20:]
    ttfts = sorted(r.ttft_s for r in recent if r.ttft_s is not None)
    ttft = f", TTFT of the last ones {ttfts[len(ttfts) // 2]:.2f} s" if ttfts else ""
    return Text(
        f"{load.elapsed_s:5.0f} s: {load.num_sent} requests sent ({num_sessions} sessions planned), "
        f"{load.num_sent - done} open, {done - failed} whole, {failed} failed{ttft}"
    )


def _first_model(url: str, api_key: str) -> str:
    """Raises OSError when the server does not tell."""
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {api_key}"})
    try:
        with urllib.request.urlopen(request, timeout=_MODELS_TIMEOUT_S) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, KeyError, IndexError, TypeError, ValueError) as error:
        raise OSError(
            f"{url}/v1/models does not name a model ({error}); is the server up? --model names one"
        ) from error


def _report(options: LoadOptions, classes: Sequence[WorkClass], model: str, summary: Summary) -> bytes:
    asked = {
        "url": options.url, "model": model, "classes": classes, "seconds": options.seconds, "seed": options.seed,
        "process": options.process,
    }  # fmt: skip
    return msgspec.json.format(msgspec.json.encode({"asked": asked, "summary": summary}), indent=2) + b"\n"
