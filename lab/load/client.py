"""One streamed completion, and when its tokens came."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp
import msgspec


class Record(msgspec.Struct):
    """What became of one request, as the client saw it. One line of the JSON lines."""

    work: str
    session: int
    turn: int
    prompt_tokens: int
    output_tokens: int
    """Asked for."""
    planned_s: float
    """When it should have been sent, from the start of the load."""
    sent_s: float
    ttft_s: float | None = None
    gaps_s: list[float] = []
    """Between neighbouring events of the stream; one event is one token of most servers."""
    end_to_end_s: float = 0.0
    tokens: int = 0
    """Received, as the server counts them."""
    status: int = 0
    error: str = ""
    """Also of a reply that is shorter than asked for. Empty: the request came whole."""
    text: str = ""
    retry_after_s: float | None = None
    """What the server said in `Retry-After`."""

    @property
    def late_s(self) -> float:
        """By how much this generator itself was late."""
        return max(0.0, self.sent_s - self.planned_s)


@dataclass(frozen=True)
class Target:
    """The server, and what every request to it carries."""

    url: str
    model: str
    headers: Mapping[str, str]
    extra: Mapping[str, object]
    """Added to every body, e.g. `ignore_eos`."""
    timeout_s: float


async def complete(
    http: aiohttp.ClientSession, target: Target, prompt: Sequence[int], record: Record, headers: Mapping[str, str]
) -> list[int]:
    """Fills in `record`; returns the reply's token ids, where the server tells them. What fails is in the record."""
    body = {
        "model": target.model,
        "prompt": list(prompt),
        "max_tokens": record.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.extra,
    }
    reply: list[int] = []
    started_s = time.perf_counter()
    try:
        async with http.post(
            f"{target.url}/v1/completions",
            json=body,
            headers={**target.headers, **headers},
            timeout=aiohttp.ClientTimeout(total=target.timeout_s),
        ) as answer:
            record.status = answer.status
            if answer.status != 200:
                record.error = f"{answer.status}: {(await answer.text())[:300]}"
                if told := answer.headers.get("Retry-After"):
                    record.retry_after_s = float(told)
            else:
                await _read(answer, record, started_s, reply)
    except TimeoutError:
        record.error = f"no end within {target.timeout_s:g} s"
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        # The latter ones: an event of another form. One odd reply must not end the load.
        record.error = f"{type(error).__name__}: {error}"
    record.end_to_end_s = time.perf_counter() - started_s
    if not record.error and record.tokens < record.output_tokens:
        record.error = f"{record.tokens} tokens of {record.output_tokens}"
    return reply


async def _read(answer: aiohttp.ClientResponse, record: Record, started_s: float, reply: list[int]) -> None:
    last_s = started_s
    num_events = 0
    async for line in answer.content:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            record.error = f"broken off: {event['error']}"[:300]
            return
        if usage := event.get("usage"):
            record.tokens = usage["completion_tokens"]
        if not event.get("choices"):
            continue
        choice = event["choices"][0]
        token_ids = choice.get("token_ids") or ()
        if not (choice.get("text") or token_ids or choice.get("finish_reason")):
            continue
        now_s = time.perf_counter()
        if record.ttft_s is None:
            record.ttft_s = now_s - started_s
        else:
            record.gaps_s.append(now_s - last_s)
        last_s = now_s
        num_events += 1
        reply.extend(token_ids)
        record.text += choice.get("text") or ""
    record.tokens = record.tokens or num_events
