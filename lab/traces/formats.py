"""Readers of published formats. Which one a file has is seen from its first line.

* Azure LLM inference traces (2023 and 2024; Azure/AzurePublicDataset): CSV with TIMESTAMP, ContextTokens,
  GeneratedTokens.
* Mooncake traces (kvcache-ai/Mooncake, FAST25-release): JSON lines with timestamp in ms, input_length, output_length
  and hash_ids, one per 512 tokens of the prompt.
* BurstGPT (HPMLL/BurstGPT): CSV with Timestamp in s, Request tokens, Response tokens; failed requests have no response
  and are left out.
"""

import csv
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from lab.traces.trace import TraceRequest

MOONCAKE_BLOCK_TOKENS = 512
_FRACTION_DIGITS = 6


class TraceError(ValueError):
    """A file that is no trace in a known format; names the file and, where there is one, the line."""


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_trace(path: Path) -> list[TraceRequest]:
    """All requests, in order of their time. Raises `TraceError`."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = file.readline()
            lines = _lines(first, file)
            requests = sorted(_reader(path, first)(path, lines), key=lambda request: request.at_s)
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is no text: {error}") from error
    if not requests:
        raise TraceError(f"the trace {path} holds no request")
    start_s = requests[0].at_s
    return [replace(request, at_s=request.at_s - start_s) for request in requests]


def _lines(first: str, rest: Iterable[str]) -> Iterator[str]:
    yield first
    yield from rest


def _reader(path: Path, first: str) -> Callable[[Path, Iterator[str]], Iterator[TraceRequest]]:
    if first.lstrip().startswith("{"):
        return _mooncake
    columns = set(next(csv.reader([first]), []))
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= columns:
        return _azure
    if {"Timestamp", "Request tokens", "Response tokens"} <= columns:
        return _burstgpt
    raise TraceError(
        f"{path} begins with {first.strip()[:80]!r}, which is no trace of Azure (TIMESTAMP,ContextTokens,"
        "GeneratedTokens), Mooncake (JSON lines) or BurstGPT (Timestamp,...,Request tokens,Response tokens)"
    )


def _azure(path: Path, lines: Iterator[str]) -> Iterator[TraceRequest]:
    for number, row in _rows(lines):
        try:
            at_s = _seconds(row["TIMESTAMP"])
            yield TraceRequest(at_s, int(row["ContextTokens"]), max(1, int(row["GeneratedTokens"])))
        except (TypeError, ValueError) as error:
            raise TraceError(f"line {number} of {path}: {error}") from error


def _burstgpt(path: Path, lines: Iterator[str]) -> Iterator[TraceRequest]:
    for number, row in _rows(lines):
        try:
            prompt, output = int(row["Request tokens"]), int(row["Response tokens"])
            if output > 0:
                yield TraceRequest(float(row["Timestamp"]), prompt, output)
        except (TypeError, ValueError) as error:
            raise TraceError(f"line {number} of {path}: {error}") from error


def _mooncake(path: Path, lines: Iterator[str]) -> Iterator[TraceRequest]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise TraceError(f"line {number} of {path}: {error}") from error
        at_s, blocks = item.timestamp / 1000, tuple(item.hash_ids)
        yield TraceRequest(at_s, item.input_length, max(1, item.output_length), blocks, MOONCAKE_BLOCK_TOKENS)


def _rows(lines: Iterator[str]) -> Iterator[tuple[int, dict[str, str]]]:
    return enumerate(csv.DictReader(lines), start=2)


def _seconds(timestamp: str) -> float:
    """Of `2023-11-16 18:17:03.9799600`, with or without a zone; more digits than Python takes are cut off."""
    whole, dot, fraction = timestamp.partition(".")
    digits = re.match(r"\d*", fraction)
    kept = digits[0][:_FRACTION_DIGITS] if digits else ""
    zone = fraction[len(digits[0]) :] if digits else ""
    text = f"{whole}.{kept}{zone}" if dot and kept else timestamp
    at = datetime.fromisoformat(text)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
