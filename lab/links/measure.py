"""Runs the arms in rounds, so that what else the machine does hits all of them alike."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lab.links.arms.kinds import ARMS, ArmFailed
from lab.links.pair import Pair, PairLost
from lab.links.report import Fairness, Series, Skipped
from lab.links.shapes import BlockShape
from lab.links.work import large_and_small, scattered

Say = Callable[[str], None]
_PAUSE_S = 0.01
"""Between two one-block transfers behind a large one."""
_LARGE_TIMEOUT_S = 30.0
_SLOWEST_BYTES_PER_S = 100e6
"""What a large transfer may come down to before it counts as failed."""


@dataclass(frozen=True)
class Placement:
    """Arms that share a pair of processes."""

    arms: tuple[str, ...]
    devices: tuple[int, int] | None = None
    """The GPUs of the exporter and of the importer."""
    rests: bool = False
    """Stopped while others are measured: idle, it would still use a core."""

    @property
    def links(self) -> tuple[str, ...]:
        return tuple(arm for arm in self.arms if ARMS[arm].is_link)


@dataclass(frozen=True)
class Plan:
    shapes: tuple[BlockShape, ...]
    placements: tuple[Placement, ...]
    cache_bytes: int
    """At most, of each cache."""
    rounds: int
    """At most; fewer when time runs out."""
    seconds: float
    """For everything. A round that has begun is finished."""
    fairness_seconds: float
    """Of these, for the transfers behind a large one."""
    move_timeout_s: float
    large_bytes: int
    large_repeats: int
    concurrent: tuple[int, ...] = (1, 8)
    num_small: int = 200
    """One-block transfers behind a large one, at most."""
    num_alone: int = 20


@dataclass
class Results:
    series: list[Series] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    fairness: list[Fairness] = field(default_factory=list)

    def skip(self, arm: str, reason: str, is_failure: bool) -> None:
        skipped = Skipped(arm, reason, is_failure)
        if skipped not in self.skipped:
            self.skipped.append(skipped)

    def skip_all(self, arms: Sequence[str], reason: str) -> None:
        for arm in arms:
            self.skip(arm, reason, is_failure=True)


@dataclass(frozen=True)
class _Open:
    """A placement whose processes run."""

    placement: Placement
    pair: Pair

    def usable(self, arms: Sequence[str]) -> list[str]:
        return [] if self.pair.is_lost else [arm for arm in arms if arm not in self.pair.unusable]


@dataclass(frozen=True)
class _Work:
    """One arm with so many transfers at once."""

    open_: _Open
    arm: str
    concurrent: int


def measure(plan: Plan, say: Say) -> Results:
    """All of it. Arms that cannot run, or fail, are in `skipped`; every process has ended when this returns."""
    results = Results()
    until_s = time.monotonic() + plan.seconds
    rounds_until_s = until_s - plan.fairness_seconds
    with contextlib.ExitStack() as stack:
        opened = [
            _Open(placement, stack.enter_context(Pair(placement.arms, placement.devices)))
            for placement in plan.placements
        ]
        for index, shape in enumerate(plan.shapes):
            say(f"{shape.model}: setting up")
            num_blocks = shape.num_blocks(plan.cache_bytes, max(plan.concurrent))
            usable = _set_up(opened, shape, num_blocks, results)
            now_s = time.monotonic()
            share_s = (rounds_until_s - now_s) / (len(plan.shapes) - index)
            _measure_shape(plan, usable, shape, now_s + share_s, results, say)
        _measure_fairness(plan, [each for each in opened if each.placement.links], until_s, results, say)
    return results


def _measure_shape(
    plan: Plan, opened: Sequence[_Open], shape: BlockShape, until_s: float, results: Results, say: Say
) -> None:
    num_blocks = shape.num_blocks(plan.cache_bytes, max(plan.concurrent))
    works = [
        _Work(each, arm, concurrent)
        for each in opened
        for arm in each.usable(each.placement.arms)
        for concurrent in (plan.concurrent if ARMS[arm].is_concurrent else (1,))
    ]
    seconds: dict[tuple[str, int], list[float]] = {(work.arm, work.concurrent): [] for work in works}
    failed: set[str] = set()
    number, round_s = 0, 0.0
    while number <= plan.rounds and (number <= 1 or time.monotonic() + round_s <= until_s):
        say(f"{shape.model}: {f'round {number} of {plan.rounds}' if number else 'warming up'}")
        started_s = time.monotonic()
        for work in _rotated(works, number):
            if work.arm in failed or work.open_.pair.is_lost:
                continue
            try:
                taken_s = _move(plan, work, num_blocks, number)
            except ArmFailed as error:
                lost = work.open_.placement.arms if isinstance(error, PairLost) else (work.arm,)
                failed.update(lost)
                for arm in lost:
                    results.skip(arm, f"failed at {shape.model}: {error}", is_failure=True)
                continue
            if number:
                seconds[work.arm, work.concurrent].append(taken_s)
        round_s = time.monotonic() - started_s
        number += 1
    num_bytes = num_blocks * shape.block_bytes
    results.series += [
        Series(arm, shape.model, concurrent, num_blocks, num_bytes, taken)
        for (arm, concurrent), taken in seconds.items()
        if taken and arm not in failed
    ]


def _set_up(opened: Sequence[_Open], shape: BlockShape, num_blocks: int, results: Results) -> list[_Open]:
    """All pairs side by side. Those that cannot be are left out."""
    begun, usable = [], []
    for each in opened:
        if each.pair.is_lost:
            continue
        if each.placement.rests:
            each.pair.wake()
        try:
            setup = each.pair.begin_setup(shape, num_blocks)
        except ArmFailed as error:
            results.skip_all(each.placement.arms, f"could not be set up: {error}")
        else:
            begun.append((each, setup))
    for each, setup in begun:
        try:
            each.pair.end_setup(setup)
        except ArmFailed as error:
            results.skip_all(each.placement.arms, f"could not be set up: {error}")
            continue
        for arm, reason in each.pair.unusable.items():
            results.skip(arm, reason, is_failure=False)
        usable.append(each)
    for each, _ in begun:
        if each.placement.rests:
            each.pair.rest()
    return usable


def _rotated(works: Sequence[_Work], number: int) -> list[_Work]:
    """Begins with another one every round: none always comes after the same neighbour's heat."""
    first = (number * 3) % len(works) if works else 0
    return [*works[first:], *works[:first]]


def _move(plan: Plan, work: _Work, num_blocks: int, number: int) -> float:
    transfers = scattered(num_blocks, work.concurrent, f"{work.arm}-{work.concurrent}-{number}")
    pair, rests = work.open_.pair, work.open_.placement.rests
    if rests:
        pair.wake()
    try:
        return pair.move(work.arm, transfers, plan.move_timeout_s)
    finally:
        if rests:
            pair.rest()


def _measure_fairness(plan: Plan, opened: Sequence[_Open], until_s: float, results: Results, say: Say) -> None:
    shape = plan.shapes[min(1, len(plan.shapes) - 1)]
    works = [
        (each, link)
        for each in _set_up(opened, shape, shape.num_blocks(plan.cache_bytes, 2), results)
        for link in each.usable(each.placement.links)
    ]
    for index, (each, link) in enumerate(works):
        say(f"one block of {shape.model} behind {plan.large_bytes / (1 << 30):.3g} GiB over {link}")
        share_s = (until_s - time.monotonic()) / (len(works) - index)
        try:
            results.fairness.append(_behind(plan, each.pair, link, shape, time.monotonic() + share_s))
        except ArmFailed as error:
            results.skip(link, f"failed behind a large transfer: {error}", is_failure=True)


def _behind(plan: Plan, pair: Pair, link: str, shape: BlockShape, until_s: float) -> Fairness:
    num_large = max(1, plan.large_bytes // shape.block_bytes)
    large_bytes = num_large * shape.block_bytes
    timeout_s = _LARGE_TIMEOUT_S + large_bytes / _SLOWEST_BYTES_PER_S
    _, small = large_and_small(pair.num_blocks, 1, plan.num_alone, f"{link}-alone")
    pair.queue(link, None, small[:2], _PAUSE_S, timeout_s)  # warms up
    alone_s = pair.queue(link, None, small[2:], _PAUSE_S, timeout_s).small_s
    large_s: list[float] = []
    behind_s: list[float] = []
    while len(large_s) < plan.large_repeats and (not large_s or time.monotonic() + max(large_s) <= until_s):
        large, small = large_and_small(pair.num_blocks, num_large, plan.num_small, f"{link}-{len(large_s)}")
        queued = pair.queue(link, large, small, _PAUSE_S, timeout_s)
        large_s.append(queued.large_s)
        behind_s += queued.small_s
    return Fairness(link, shape.model, large_bytes, shape.block_bytes, large_s, alone_s, behind_s)
