"""What the engine's thread tells its endpoint, when its computation is in memory only some time later."""

from collections.abc import Callable
from typing import Any, cast

from kvtransfer.rank_endpoint import RankEndpoint
from kvtransfer.step_orders import AbortExport, AnnounceBlocks, FinishExport, OpenImport, PlaceImport, StepOrders
from kvtransfer.vllm_rank_side import RankSide


class RecordingEndpoint:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def check(self) -> None:
        return

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.calls.append((name, *arguments))


class LateFence:
    """The computation is in memory when `compute` is called."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def when_computed(self, call: Callable[[], None]) -> None:
        self._waiting.append(call)

    def compute(self) -> None:
        for call in self._waiting:
            call()
        self._waiting.clear()


class Side:
    def __init__(self) -> None:
        self.endpoint, self.fence = RecordingEndpoint(), LateFence()
        self._side = RankSide(cast(RankEndpoint, self.endpoint), self.fence)

    def step(self, **orders: Any) -> list[str]:
        """One engine step; what the endpoint has been told by its end."""
        step = StepOrders(**orders)
        self._side.before_forward(step)
        self._side.after_forward(step)
        return [str(call[0]) for call in self.endpoint.calls]


ANNOUNCED = AnnounceBlocks("t", [1, 2], 8)


def test_blocks_are_announced_when_they_are_computed() -> None:
    side = Side()
    assert side.step(announcements=[ANNOUNCED]) == []
    side.fence.compute()
    assert side.endpoint.calls == [("announce", "t", [1, 2], 8)]


def test_a_preempted_prefill_does_not_announce_what_it_gave_up() -> None:
    side = Side()
    side.step(announcements=[ANNOUNCED])
    assert side.step(restart_exports=["t"]) == ["restart_export"]
    side.fence.compute()
    assert len(side.endpoint.calls) == 1


def test_an_end_stands_for_the_announcements_before_it() -> None:
    side = Side()
    side.step(announcements=[ANNOUNCED, AnnounceBlocks("u", [3], 4)])
    finished = FinishExport("t", [1, 2], 8, 7)
    assert side.step(finish_exports=[finished], abort_exports=[AbortExport("u", "why")]) == [
        "finish_export",
        "abort_export",
    ]
    side.fence.compute()
    assert len(side.endpoint.calls) == 2


def test_blocks_are_written_only_when_the_computation_before_is_over() -> None:
    side = Side()
    wanted = OpenImport("t", "request", [("address", "epoch")], b"hash", 8, True)
    placed = PlaceImport("t", 0, [5, 6], awaited=True)
    assert side.step(open_imports=[wanted], place_imports=[placed]) == ["open_sharded_import"]
    side.fence.compute()
    assert side.endpoint.calls[1:] == [("place_import", "t", 0, [5, 6])]


def test_a_cancelled_import_gets_no_place_any_more() -> None:
    side = Side()
    side.step(place_imports=[PlaceImport("t", 0, [5, 6], awaited=True)])
    assert side.step(cancel_imports=["t"]) == ["cancel_import"]
    side.fence.compute()
    assert len(side.endpoint.calls) == 1
