"""The scheduler side of the connector, against vLLM's own Request objects."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from kvtransfer.connector.step_orders import ClosedRequest, StepOrders, hash_prompt
from kvtransfer.connector.vllm_scheduler_side import SchedulerSide

BLOCK = 4
EXPORTER = {"ranks": [{"rank": 0, "address": "ipc:///p", "epoch": "e1"}]}


class FakeKvCache:
    """Block tables by request, as the scheduler's cache manager would answer."""

    def __init__(self) -> None:
        self.tables: dict[str, list[int]] = {}
        self.block_pool = SimpleNamespace(
            hash_block_size=BLOCK, num_gpu_blocks=101, get_num_free_blocks=lambda: 100 - len(self._in_use())
        )
        self.coordinator = SimpleNamespace(single_type_managers=[self])

    def _in_use(self) -> set[int]:
        return {block for table in self.tables.values() for block in table}

    @property
    def req_to_blocks(self) -> dict[str, list[Any]]:
        return {
            request_id: [SimpleNamespace(block_id=block, is_null=False) for block in table]
            for request_id, table in self.tables.items()
        }

    def get_block_ids(self, request_id: str) -> tuple[list[int]]:
        return (self.tables[request_id],)


def hasher(request: Request) -> list[Any]:
    start = len(request.block_hashes) * BLOCK
    tokens = list(request.all_token_ids)
    return [tuple(tokens[at : at + BLOCK]) for at in range(start, len(tokens) - BLOCK + 1, BLOCK)]


def request(request_id: str, prompt: list[int], params: dict[str, Any] | None) -> Request:
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params} if params else None)
    made = Request(request_id, list(prompt), sampling, None, block_hasher=hasher)
    made.status = RequestStatus.WAITING
    return made


def step(new: dict[str, tuple[int, int]] | None = None, cached: dict[str, tuple[int, int]] | None = None,
         resumed: set[str] | None = None) -> SchedulerOutput:  # fmt: skip
    """Requests of one step as request id -> (tokens computed before, tokens scheduled)."""
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [
        SimpleNamespace(req_id=request_id, num_computed_tokens=before)
        for request_id, (before, _) in (new or {}).items()
    ]
    cached = cached or {}
    output.scheduled_cached_reqs.req_ids = list(cached)
    output.scheduled_cached_reqs.num_computed_tokens = [before for before, _ in cached.values()]
    output.scheduled_cached_reqs.resumed_req_ids = resumed or set()
    output.num_scheduled_tokens = {
        request_id: scheduled for request_id, (_, scheduled) in ((new or {}) | cached).items()
    }
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    return output


@pytest.fixture
def cache() -> FakeKvCache:
    return FakeKvCache()


@pytest.fixture
def side(cache: FakeKvCache) -> SchedulerSide:
    made = SchedulerSide(BLOCK)
    made.bind(cache)  # type: ignore[arg-type]
    return made


def export_params(transfer_id: str = "transfer-1") -> dict[str, Any]:
    return {"mode": "export", "transfer_id": transfer_id}


def import_params(first_token: bool, transfer_id: str = "transfer-1") -> dict[str, Any]:
    return {"mode": "import", "transfer_id": transfer_id, "first_token": first_token, "exporter": EXPORTER}


def orders_of(side: SchedulerSide) -> StepOrders:
    return side.build_orders(step())


def test_each_chunk_announces_the_blocks_computed_so_far(side: SchedulerSide, cache: FakeKvCache) -> None:
    side.on_new_request(request("p", list(range(10)), export_params()))
    cache.tables["p"] = [11, 12]
    first = side.build_orders(step(new={"p": (0, 6)}))
    cache.tables["p"] = [11, 12, 13]
    second = side.build_orders(step(cached={"p": (6, 4)}))
    assert [o.transfer_id for o in first.open_exports] == ["transfer-1"]
    assert first.open_exports[0].prompt_hash == hash_prompt(range(10))
    assert [(o.block_ids, o.num_tokens) for o in first.announcements] == [([11, 12], 6)]
    assert second.open_exports == []
    assert [(o.block_ids, o.num_tokens) for o in second.announcements] == [([11, 12, 13], 10)]
    assert [o.is_last for o in (*first.announcements, *second.announcements)] == [False, True]


def test_the_adapter_is_part_of_what_both_sides_compare(side: SchedulerSide, cache: FakeKvCache) -> None:
    poet, other = LoRARequest("poet", 7, "/adapters/poet"), LoRARequest("poet", 8, "/adapters/poet/.")
    hashes = []
    for index, (exported, imported) in enumerate([(None, None), (poet, poet), (other, other)]):
        p = request(f"p{index}", [1, 2, 3], export_params(f"transfer-{index}"))
        d = request(f"d{index}", [1, 2, 3, 0], import_params(True, f"transfer-{index}"))
        p.lora_request, d.lora_request = exported, imported
        cache.tables[p.request_id] = [1]
        for made in (p, d):
            side.on_new_request(made)
        orders = side.build_orders(step(new={p.request_id: (0, 3)}))
        hashes.append((orders.open_exports[0].prompt_hash, orders.open_imports[0].prompt_hash))
    assert all(exported == imported for exported, imported in hashes)
    assert len(set(hashes)) == 3


def test_a_prefix_cached_on_the_prefill_worker_is_announced_with_the_first_chunk(
    side: SchedulerSide, cache: FakeKvCache
) -> None:
    side.on_new_request(request("p", list(range(10)), export_params()))
    cache.tables["p"] = [1, 2, 3]
    orders = side.build_orders(step(new={"p": (8, 2)}))
    assert [(o.block_ids, o.num_tokens) for o in orders.announcements] == [([1, 2, 3], 10)]


def test_a_preempted_prefill_starts_over(side: SchedulerSide, cache: FakeKvCache) -> None:
    side.on_new_request(request("p", list(range(10)), export_params()))
    cache.tables["p"] = [11, 12]
    side.build_orders(step(new={"p": (0, 8)}))
    cache.tables["p"] = [21]
    orders = side.build_orders(step(cached={"p": (0, 4)}, resumed={"p"}))
    assert orders.restart_exports == ["transfer-1"]
    assert [(o.block_ids, o.num_tokens) for o in orders.announcements] == [([21], 4)]


def finished(made: Request, status: RequestStatus, tokens: list[int]) -> Request:
    made.append_output_token_ids(tokens)
    made.status = status
    return made


def test_a_finished_prefill_keeps_its_blocks_and_names_the_first_token(side: SchedulerSide, cache: FakeKvCache) -> None:
    prefill = request("p", list(range(8)), export_params())
    side.on_new_request(prefill)
    cache.tables["p"] = [11, 12, 13]
    side.build_orders(step(new={"p": (0, 8)}))
    keep, reply = side.request_finished(finished(prefill, RequestStatus.FINISHED_LENGTH_CAPPED, [77]))
    (order,) = orders_of(side).finish_exports
    assert keep
    assert (order.block_ids, order.num_tokens, order.first_token) == ([11, 12], 8, 77)
    assert reply is not None
    assert reply["mode"] == "import"
    assert reply["first_token"] is False


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_ABORTED])
def test_a_prefill_that_ends_otherwise_aborts_its_export(
    side: SchedulerSide, cache: FakeKvCache, status: RequestStatus
) -> None:
    prefill = request("p", list(range(8)), export_params())
    side.on_new_request(prefill)
    cache.tables["p"] = [11, 12]
    side.build_orders(step(new={"p": (0, 8)}))
    keep, reply = side.request_finished(finished(prefill, status, [2]))
    assert keep
    assert reply is None
    assert [o.transfer_id for o in orders_of(side).abort_exports] == ["transfer-1"]


def test_a_prefill_aborted_in_the_queue_holds_nothing(side: SchedulerSide) -> None:
    prefill = request("p", list(range(8)), export_params())
    side.on_new_request(prefill)
    assert side.request_finished(finished(prefill, RequestStatus.FINISHED_ABORTED, [])) == (False, None)
    orders = orders_of(side)
    assert orders.open_exports == []
    assert orders.abort_exports == []


def test_an_import_asks_only_for_what_the_cache_lacks(side: SchedulerSide) -> None:
    decode = request("d", [*range(10), 0], import_params(first_token=True))
    side.on_new_request(decode)
    assert side.num_tokens_to_load(decode, 4) == (6, True)
    side.blocks_allocated(decode, [50, 51, 52], 6)
    orders = orders_of(side)
    (opened,), (placed,) = orders.open_imports, orders.place_imports
    assert (opened.num_tokens, opened.prompt_hash, opened.wants_first_token) == (10, hash_prompt(range(10)), True)
    assert (placed.first_block, placed.block_ids, placed.awaited) == (1, [51, 52], True)


def test_the_first_token_replaces_the_placeholder_and_its_block_hash(side: SchedulerSide) -> None:
    decode = request("d", [*range(7), 0], import_params(first_token=True))
    side.on_new_request(decode)
    side.num_tokens_to_load(decode, 0)
    side.blocks_allocated(decode, [50, 51], 7)
    side.imports_closed([ClosedRequest("d", 99, loaded=True)])
    assert decode.prompt_token_ids == [*range(7), 99]
    assert list(decode.all_token_ids) == [*range(7), 99]
    assert decode.block_hashes == [(0, 1, 2, 3), (4, 5, 6, 99)]
    assert side.num_tokens_to_load(decode, 0) == (0, False)


def test_a_fully_cached_import_waits_for_the_token_without_blocks(side: SchedulerSide) -> None:
    decode = request("d", [*range(8), 0], import_params(first_token=True))
    side.on_new_request(decode)
    assert side.num_tokens_to_load(decode, 8) == (None, False)
    assert side.num_tokens_to_load(decode, 8) == (None, False)
    (placed,) = orders_of(side).place_imports
    assert (placed.block_ids, placed.awaited) == ([], False)
    side.imports_closed([ClosedRequest("d", 5, loaded=True)])
    assert side.num_tokens_to_load(decode, 8) == (0, False)
    assert list(decode.all_token_ids)[-1] == 5


def test_exact_mode_loads_the_whole_prompt_and_leaves_it_as_it_is(side: SchedulerSide) -> None:
    decode = request("d", list(range(8)), import_params(first_token=False))
    side.on_new_request(decode)
    assert side.num_tokens_to_load(decode, 4) == (4, True)
    side.blocks_allocated(decode, [50, 51], 4)
    side.imports_closed([ClosedRequest("d", 99, loaded=True)])
    assert list(decode.all_token_ids) == list(range(8))


def test_exact_mode_drops_a_transfer_of_one_token(side: SchedulerSide) -> None:
    decode = request("d", list(range(9)), import_params(first_token=False))
    side.on_new_request(decode)
    assert side.num_tokens_to_load(decode, 8) == (0, False)
    assert orders_of(side).cancel_imports == ["transfer-1"]


def test_a_preempted_decode_recomputes_instead_of_asking_again(side: SchedulerSide) -> None:
    decode = request("d", [*range(10), 0], import_params(first_token=True))
    side.on_new_request(decode)
    side.num_tokens_to_load(decode, 0)
    side.blocks_allocated(decode, [50, 51, 52], 10)
    side.imports_closed([ClosedRequest("d", 99, loaded=True)])
    orders_of(side)
    assert side.num_tokens_to_load(decode, 0) == (0, False)
    assert orders_of(side).place_imports == []


def test_a_request_that_ends_while_loading_cancels_its_import(side: SchedulerSide, cache: FakeKvCache) -> None:
    decode = request("d", [*range(10), 0], import_params(first_token=True))
    side.on_new_request(decode)
    side.num_tokens_to_load(decode, 0)
    cache.tables["d"] = [50, 51, 52]
    side.blocks_allocated(decode, [50, 51, 52], 10)
    orders_of(side)
    side.request_finished(finished(decode, RequestStatus.FINISHED_ABORTED, []))
    assert orders_of(side).cancel_imports == ["transfer-1"]
    stats = side.pool_stats()
    assert stats is not None
    assert (stats.used, stats.leased, stats.free) == (0, 3, 97)
    side.imports_closed([ClosedRequest("d", 99, loaded=True)])  # a late report changes nothing
    side.blocks_released({"d"})
    del cache.tables["d"]
    stats = side.pool_stats()
    assert stats is not None
    assert (stats.used, stats.leased, stats.free) == (0, 0, 100)


def test_the_priority_of_a_request_is_that_of_its_copies(side: SchedulerSide) -> None:
    for name, said in (("urgent", {"priority": -4}), ("plain", {})):
        side.on_new_request(request(name, list(range(10)), {**import_params(False, f"transfer-{name}"), **said}))
    assert [o.priority for o in orders_of(side).open_imports] == [-4, 0]


def test_an_export_under_an_id_in_use_is_an_ordinary_request_and_takes_no_blocks_along(
    side: SchedulerSide, cache: FakeKvCache
) -> None:
    """Two exports under one id would free the blocks of one and lose those of the other."""
    owner, second = (request(name, list(range(8)), export_params()) for name in ("owner", "second"))
    side.on_new_request(owner)
    side.on_new_request(second)
    cache.tables |= {"owner": [1, 2], "second": [3, 4]}
    opened = side.build_orders(step(new={"owner": (0, 8), "second": (0, 8)}))
    assert [(o.transfer_id, o.request_id) for o in opened.open_exports] == [("transfer-1", "owner")]

    assert side.request_finished(finished(second, RequestStatus.FINISHED_LENGTH_CAPPED, [5])) == (False, None)
    assert side.request_finished(finished(owner, RequestStatus.FINISHED_LENGTH_CAPPED, [5]))[0]
    assert [o.block_ids for o in orders_of(side).finish_exports] == [[1, 2]]

    while_held, afterwards = (request(name, list(range(8)), export_params()) for name in ("held", "afterwards"))
    side.on_new_request(while_held)
    side.blocks_released({"owner"})
    side.on_new_request(afterwards)
    cache.tables |= {"held": [3, 4], "afterwards": [5, 6]}
    opened = side.build_orders(step(new={"held": (0, 8), "afterwards": (0, 8)}))
    assert [o.request_id for o in opened.open_exports] == ["afterwards"], "the id is free again when its blocks are"


def test_an_import_under_an_id_in_use_is_an_ordinary_request(side: SchedulerSide) -> None:
    owner, second = (request(name, list(range(10)), import_params(False)) for name in ("owner", "second"))
    side.on_new_request(owner)
    side.on_new_request(second)
    assert [o.request_id for o in orders_of(side).open_imports] == ["owner"]
    assert side.num_tokens_to_load(owner, 0) == (10, True)
    assert side.num_tokens_to_load(second, 0) == (0, False), "it is computed here"
    side.request_finished(finished(second, RequestStatus.FINISHED_STOPPED, [1]))
    assert orders_of(side).cancel_imports == [], "the owner's is not touched"
    side.request_finished(finished(owner, RequestStatus.FINISHED_ABORTED, []))
    assert orders_of(side).cancel_imports == ["transfer-1"]
    third = request("third", list(range(10)), import_params(False))
    side.on_new_request(third)
    assert [o.request_id for o in orders_of(side).open_imports] == ["third"]


def test_computed_tokens_grow_with_chunks_and_not_with_empty_steps(side: SchedulerSide) -> None:
    def computed() -> int | None:
        stats = side.pool_stats()
        return stats.tokens_computed if stats is not None else None

    side.build_orders(step({"p": (0, 512)}))
    assert computed() == 512
    side.build_orders(step({"q": (0, 100)}, {"p": (512, 412)}))
    assert computed() == 1024
    side.build_orders(step())
    assert computed() is None, "nothing to report"


@pytest.mark.parametrize(
    "params",
    [
        {"mode": "export"},
        {"mode": "export", "transfer_id": 7},
        {"mode": "import", "transfer_id": "transfer-1"},
        {"mode": "import", "transfer_id": "transfer-1", "exporter": EXPORTER, "priority": "high"},
        {"mode": "import", "transfer_id": "transfer-1", "exporter": {"ranks": []}},
        {"mode": "import", "transfer_id": "transfer-1", "exporter": {"ranks": [{"rank": "x"}]}},
        {"mode": "steal", "transfer_id": "transfer-1"},
        {"do_remote_prefill": True},
    ],
)
def test_nonsense_parameters_leave_an_ordinary_request(side: SchedulerSide, params: dict[str, Any]) -> None:
    odd = request("x", list(range(8)), params)
    side.on_new_request(odd)
    assert side.num_tokens_to_load(odd, 0) == (0, False)
    assert orders_of(side) == StepOrders(no_forward=True)
    assert side.request_finished(finished(odd, RequestStatus.FINISHED_STOPPED, [1])) == (False, None)
