"""Starts every arm, sends each the same work in turn, and stops them."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from lab.cpu_use import cpu_seconds
from lab.load.text import prompt_of
from lab.proxy_cost.arms import MODEL_NAME, Arm
from lab.proxy_cost.client import closed_loop
from lab.proxy_cost.work import PROMPT_TOKENS, Cell, Sample
from lab.server_process import Server, ServerFailed

Say = Callable[[str], None]
Samples = dict[tuple[str, str], list[Sample]]
"""By arm and cell, one per round."""

CELL_TIMEOUT_S = 60.0
_NUM_PROMPTS = 64
_WARM_UP = Cell(32, 16, 64)


def prompts(model: Path) -> list[str]:
    """Texts of exactly `PROMPT_TOKENS` tokens."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    found: list[str] = []
    seed = 0
    while len(found) < _NUM_PROMPTS:
        text = tokenizer.decode(prompt_of(encode, seed, PROMPT_TOKENS))
        # Now and then a text has other tokens than it was made of.
        if len(encode(text)) == PROMPT_TOKENS:
            found.append(text)
        seed += 1
    return found


def measure(
    arms: Sequence[Arm], cells: Sequence[Cell], texts: Sequence[str], directory: Path, until_s: float, say: Say
) -> Samples:
    """Rounds until the monotonic clock says `until_s`, at least one; the arm that begins changes with each round.

    Raises `ServerFailed` or `client.WrongAnswer`.
    """
    samples: Samples = {(arm.name, cell.name): [] for arm in arms for cell in cells}
    with _servers(arms, directory) as servers:
        for arm in arms:
            _measure_once(arm, _WARM_UP, texts, servers)
        round_s, rounds = 0.0, 0
        while not rounds or time.monotonic() + round_s < until_s:
            since_s = time.monotonic()
            for cell in cells:
                for number in range(len(arms)):
                    arm = arms[(number + rounds) % len(arms)]
                    samples[arm.name, cell.name].append(_measure_once(arm, cell, texts, servers))
            round_s = time.monotonic() - since_s
            rounds += 1
            say(f"round {rounds} took {round_s:.0f} s")
    return samples


@contextlib.contextmanager
def _servers(arms: Sequence[Arm], directory: Path) -> Iterator[Mapping[str, Server]]:
    """All up at the same time; those that send requests on are started when the others are there."""
    servers: dict[str, Server] = {}
    try:
        for front in (False, True):
            started = [arm for arm in arms if bool(arm.behind) is front]
            servers.update({arm.name: Server(arm.launch, directory) for arm in started})
            for arm in started:
                servers[arm.name].wait_until_healthy()
        yield servers
    finally:
        for server in reversed(servers.values()):
            server.stop()


def _measure_once(arm: Arm, cell: Cell, texts: Sequence[str], servers: Mapping[str, Server]) -> Sample:
    server = servers[arm.name]
    front = [server.process.pid]
    behind = [servers[arm.behind].process.pid] if arm.behind else []
    before = cpu_seconds(front), cpu_seconds(behind)
    wall_s, answers = asyncio.run(closed_loop(server.url, MODEL_NAME, texts, cell, CELL_TIMEOUT_S))
    after = cpu_seconds(front), cpu_seconds(behind)
    if server.process.poll() is not None:
        raise ServerFailed(f"{arm.name} exited while it was measured:\n{server.log()[-2000:]}")
    return Sample(wall_s, answers, after[0] - before[0], after[1] - before[1])
