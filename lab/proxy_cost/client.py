"""A closed loop of streamed completions that costs its own process as little as possible.

Events are counted and not parsed, but for the last one with the server's own count of tokens: the client shares the
machine with what it measures.
"""

import asyncio
import re
import time
from collections.abc import Iterator, Sequence

import aiohttp

from lab.proxy_cost.work import Answer, Cell

_FURTHER_EVENTS = 2
"""Those without tokens: the one with the usage, and `[DONE]`."""
_TAIL_BYTES = 1000
_COUNTS = re.compile(rb'"prompt_tokens":\s*(\d+).*?"completion_tokens":\s*(\d+)')


class WrongAnswer(Exception):
    """A server answered with an error, or with something else than was asked for."""


class EventCounter:
    """Counts the events of a stream that comes in pieces of any size."""

    def __init__(self) -> None:
        self.events = 0
        self._last = b""

    def feed(self, piece: bytes) -> None:
        """The next bytes. An event ends with an empty line."""
        self.events += piece.count(b"\n\n")
        if self._last.endswith(b"\n") and piece.startswith(b"\n") and not self._last.endswith(b"\n\n"):
            self.events += 1
        self._last = (self._last + piece)[-_TAIL_BYTES:]

    def usage(self) -> tuple[int, int]:
        """Tokens of the prompt and of the completion; raises `WrongAnswer` if the stream did not end with them."""
        found = _COUNTS.search(self._last)
        if found is None or b"[DONE]" not in self._last:
            raise WrongAnswer(f"the stream did not end as it should: ...{self._last[-300:]!r}")
        return int(found[1]), int(found[2])


async def complete(http: aiohttp.ClientSession, url: str, model: str, prompt: str, num_tokens: int) -> Answer:
    """One greedy completion; raises `WrongAnswer` if it is not whole."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    counter = EventCounter()
    sent_s = time.perf_counter()
    first_s = 0.0
    async with http.post(f"{url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise WrongAnswer(f"{url} answered {answer.status}: {(await answer.text())[:300]}")
        async for piece in answer.content.iter_any():
            first_s = first_s or time.perf_counter()
            counter.feed(piece)
    num_prompt, num_completion = counter.usage()
    if num_completion != num_tokens:
        raise WrongAnswer(f"{url} counts {num_completion} tokens, {num_tokens} were asked for")
    return Answer(first_s - sent_s, num_completion, counter.events - _FURTHER_EVENTS, num_prompt)


async def closed_loop(
    url: str, model: str, prompts: Sequence[str], cell: Cell, timeout_s: float
) -> tuple[float, tuple[Answer, ...]]:
    """Seconds from the first request to the end of the last answer, and the answers. Raises `WrongAnswer`."""
    left: Iterator[int] = iter(range(cell.requests))
    answers: list[Answer] = []

    async def one_stream(http: aiohttp.ClientSession) -> None:
        for number in left:
            answer = await complete(http, url, model, prompts[number % len(prompts)], cell.tokens)
            answers.append(answer)

    connector = aiohttp.TCPConnector(limit=0)
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=timeout_s)) as http,
            asyncio.TaskGroup() as streams,
        ):
            started_s = time.perf_counter()
            for _ in range(cell.streams):
                streams.create_task(one_stream(http))
    except* (aiohttp.ClientError, TimeoutError, OSError) as group:
        error = group.exceptions[0]
        raise WrongAnswer(f"{url} {type(error).__name__}: {error}") from error
    except* WrongAnswer as group:
        raise WrongAnswer(str(group.exceptions[0])) from group
    return time.perf_counter() - started_s, tuple(answers)
