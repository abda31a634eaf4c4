"""What the engine's thread tells its endpoint, when its computation is in memory only some time later."""

from collections.abc import Callable, Sequence
from typing import Any, cast

from kvtransfer.connector.step_orders import (
    AbortExport,
    AnnounceBlocks,
    FinishExport,
    OpenImport,
    PlaceImport,
    StepOrders,
)
from kvtransfer.connector.vllm_rank_side import RankSide
from kvtransfer.rank_endpoint import RankEndpoint
from kvtransfer.transfers.layer_groups import LayerGroups


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


LAYERS = ("layer 0", "layer 1", "layer 2")


class Side:
    def __init__(self, announce_layers: int = 0) -> None:
        self.endpoint, self.fence = RecordingEndpoint(), LateFence()
        groups = LayerGroups(LAYERS, announce_layers)
        self._side = RankSide(cast(RankEndpoint, self.endpoint), self.fence, groups)

    def step(self, layers: Sequence[str] = (), **orders: Any) -> list[str]:
        """One engine step in which the hook is called for `layers`; what the endpoint has been told by its end."""
        step = StepOrders(**orders)
        self._side.before_forward(step)
        for layer in layers:
            self._side.layer_computed(layer)
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


LAST = AnnounceBlocks("t", [1, 2], 8, is_last=True)
ANNOUNCED_OTHER = AnnounceBlocks("u", [3], 4)


def test_layers_of_a_prompts_last_chunk_are_announced_as_they_are_computed() -> None:
    side = Side(announce_layers=2)
    side.step(LAYERS, announcements=[LAST, ANNOUNCED_OTHER])
    assert side.endpoint.calls == []
    side.fence.compute()
    assert side.endpoint.calls == [
        ("announce", "t", [1, 2], 8, 2),
        ("announce", "t", [1, 2], 8, 3),
        ("announce", "t", [1, 2], 8),
        ("announce", "u", [3], 4),
    ]


def test_without_the_option_blocks_are_announced_when_all_layers_are_computed() -> None:
    side = Side()
    side.step(LAYERS, announcements=[LAST])
    side.fence.compute()
    assert side.endpoint.calls == [("announce", "t", [1, 2], 8)]


def test_an_engine_that_never_calls_the_hook_announces_after_the_forward_pass() -> None:
    side = Side(announce_layers=1)
    side.step(announcements=[LAST])
    side.fence.compute()
    assert side.endpoint.calls == [("announce", "t", [1, 2], 8)]


def test_layers_of_the_step_before_are_not_taken_for_those_of_this_one() -> None:
    side = Side(announce_layers=2)
    side.step(LAYERS[:1], announcements=[AnnounceBlocks("u", [3], 4, is_last=True)])
    side.step(LAYERS[1:], announcements=[LAST])
    side.fence.compute()
    assert side.endpoint.calls == [("announce", "u", [3], 4), ("announce", "t", [1, 2], 8)]


def test_a_layer_after_the_end_of_a_step_announces_nothing() -> None:
    side = Side(announce_layers=1)
    side.step(announcements=[LAST])
    side.fence.compute()
    side._side.layer_computed(LAYERS[0])
    side.fence.compute()
    assert side.endpoint.calls == [("announce", "t", [1, 2], 8)]


def test_a_preempted_prefill_does_not_announce_the_layers_it_gave_up() -> None:
    side = Side(announce_layers=1)
    side.step(LAYERS, announcements=[LAST])
    assert side.step(restart_exports=["t"]) == ["restart_export"]
    side.fence.compute()
    assert len(side.endpoint.calls) == 1
