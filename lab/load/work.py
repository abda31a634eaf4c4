"""What is asked of a server: classes of requests, as given on the command line."""

import re
from dataclasses import dataclass
from typing import Any

_FORM = "NAME=RATE/s,PROMPT+OUTPUT[,ttft=SECONDS][,itl=SECONDS][,turns=N][,shared=TOKENS][,think=SECONDS]"
_HEAD = re.compile(r"(?P<name>[\w.-]+)=(?P<rate>[\d.]+)/s,(?P<prompt>\d+)\+(?P<output>\d+)")
_NUMBERS: dict[str, type] = {"ttft": float, "itl": float, "turns": int, "shared": int, "think": float}


class WorkError(ValueError):
    """A class of requests that cannot be used; a sentence."""


@dataclass(frozen=True)
class WorkClass:
    """Requests of one kind. Lengths in tokens, times in seconds."""

    name: str
    rate_per_s: float
    """Of sessions; without turns a session is one request."""
    prompt_tokens: int
    """Of the first turn, with what is shared; later turns add as many tokens of new text, less what is shared."""
    output_tokens: int
    ttft_s: float | None = None
    itl_s: float | None = None
    """A request is good if it came whole, its TTFT is at most `ttft_s` and the 99th percentile of its own gaps at most
    `itl_s`."""
    turns: int = 1
    shared_tokens: int = 0
    """The first so many tokens are the same in every session of the class, as a system prompt is."""
    think_s: float = 1.0
    """From the end of a reply to the session's next request."""

    def prompt_tokens_of_turn(self, turn: int) -> int:
        """Of a turn, counted from 0: everything said so far, and what is new."""
        new = self.prompt_tokens - self.shared_tokens
        return self.prompt_tokens + turn * (new + self.output_tokens)


def parse_work(text: str) -> WorkClass:
    """`chat=0.5/s,128+64,ttft=3,itl=0.1`. Raises `WorkError`."""
    head, *options = re.split(r",(?=[a-z]+=)", text.strip())
    match = _HEAD.fullmatch(head)
    if match is None:
        raise WorkError(f"{text!r} is no class of requests; the form is {_FORM}")
    values: dict[str, Any] = {}
    for option in options:
        name, _, value = option.partition("=")
        if name not in _NUMBERS:
            raise WorkError(f"{name} in {text!r} is unknown; there are {', '.join(_NUMBERS)}")
        try:
            values[name] = _NUMBERS[name](value)
        except ValueError as error:
            raise WorkError(f"{name}={value} in {text!r} is no number") from error
    work = WorkClass(
        name=match["name"],
        rate_per_s=float(match["rate"]),
        prompt_tokens=int(match["prompt"]),
        output_tokens=int(match["output"]),
        ttft_s=values.get("ttft"),
        itl_s=values.get("itl"),
        turns=values.get("turns", 1),
        shared_tokens=values.get("shared", 0),
        think_s=values.get("think", 1.0),
    )
    _check(work, text)
    return work


def _check(work: WorkClass, text: str) -> None:
    if work.rate_per_s <= 0:
        raise WorkError(f"the rate in {text!r} must be more than 0")
    if work.output_tokens < 1 or work.turns < 1:
        raise WorkError(f"output tokens and turns in {text!r} must be at least 1")
    if work.prompt_tokens <= work.shared_tokens:
        raise WorkError(f"the prompt in {text!r} must be longer than what is shared of it")
