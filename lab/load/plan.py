"""Which sessions start when, and what each says. Pure and deterministic."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from lab.load.arrivals import Process, arrival_times
from lab.load.work import WorkClass
from lab.traces.trace import TraceRequest

TRACE_CLASS = "trace"

# Seeds of articles: sessions, what classes share, and blocks of traces have ranges of their own.
_TURNS_PER_SESSION = 997
_SESSIONS_PER_SEED = 10**6
_SEEDS_PER_TEXTS = 10**4
_SHARED_SEED = 10**16
_TRACE_SEED = 10**17


@dataclass(frozen=True)
class Piece:
    """The first so many tokens of an article."""

    seed: int
    num_tokens: int


@dataclass(frozen=True)
class Turn:
    """What a client adds to what was said before, and how long the reply is."""

    pieces: tuple[Piece, ...]
    output_tokens: int


@dataclass(frozen=True)
class Session:
    """One client: a request, or several that follow each other."""

    start_s: float
    """From the start of the load."""
    work: str
    """Name of its class."""
    number: int
    """Counted over all classes, in order of arrival."""
    turns: tuple[Turn, ...]
    think_s: float = 0.0
    """From the end of a reply to the next request."""


def plan_sessions(
    classes: Sequence[WorkClass],
    seconds: float,
    seed: int,
    process: Process = "poisson",
    cv: float = 2.0,
    texts: int = 0,
) -> list[Session]:
    """All sessions in order of their start. Classes draw apart: adding one does not move the others.

    `texts`: another number is the same load with other words. A server that keeps prefixes would know the words of a
    load that it has served already.
    """
    wording = seed + texts * _SEEDS_PER_TEXTS
    starts: list[tuple[float, int]] = []
    for index, work in enumerate(classes):
        rng = random.Random(f"{seed}/{work.name}")
        starts += [(at_s, index) for at_s in arrival_times(process, work.rate_per_s, seconds, rng, cv)]
    sessions = []
    for number, (at_s, index) in enumerate(sorted(starts)):
        work = classes[index]
        own = (wording * _SESSIONS_PER_SEED + number) * _TURNS_PER_SESSION
        new_tokens = work.prompt_tokens - work.shared_tokens
        shared = Piece(_SHARED_SEED + wording * _SESSIONS_PER_SEED + index, work.shared_tokens)
        turns = [Turn((Piece(own + turn, new_tokens),), work.output_tokens) for turn in range(work.turns)]
        if work.shared_tokens:
            turns[0] = Turn((shared, *turns[0].pieces), work.output_tokens)
        sessions.append(Session(at_s, work.name, number, tuple(turns), work.think_s))
    return sessions


def trace_work(trace: Sequence[TraceRequest], ttft_s: float | None, itl_s: float | None) -> WorkClass:
    """The class of a trace's requests: their rate and their mean lengths, and the limits that they are held to."""
    prompt = sum(request.prompt_tokens for request in trace) // len(trace)
    output = sum(request.output_tokens for request in trace) // len(trace)
    rate_per_s = len(trace) / max(trace[-1].at_s, 1e-9)
    return WorkClass(TRACE_CLASS, rate_per_s, prompt, output, ttft_s, itl_s)


def replay(trace: Sequence[TraceRequest], work: str, seed: int) -> list[Session]:
    """A session per request. Blocks with equal ids get equal text, so that a prefix cache finds what it found then."""
    sessions = []
    for number, request in enumerate(trace):
        own = (seed * _SESSIONS_PER_SEED + number) * _TURNS_PER_SESSION
        pieces, left = [], request.prompt_tokens
        for block_id in request.block_ids:
            if left <= 0:
                break
            pieces.append(Piece(_TRACE_SEED + block_id, min(left, request.block_tokens)))
            left -= request.block_tokens
        if left > 0:
            pieces.append(Piece(own, left))
        sessions.append(Session(request.at_s, work, number, (Turn(tuple(pieces), request.output_tokens),)))
    return sessions
