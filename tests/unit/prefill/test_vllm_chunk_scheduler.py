"""Our order inside vLLM's own scheduler, without a model; and the internals of vLLM it stands on."""

import inspect
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.scheduler import SchedulerConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from cluster.host import vllm_engine
from kvtransfer.connector.step_orders import ClosedRequest
from kvtransfer.vllm_connector import RankReport
from prefill import vllm_chunk_scheduler
from prefill.step_budget import MIN_PREFILL_TOKENS
from prefill.step_cost import StepCost
from prefill.vllm_chunk_scheduler import DOUBTED_STEPS, AsyncChunkScheduler, ChunkScheduler
from tests.unit.prefill.vllm_fake_engine import BLOCK, BUDGET, FakeEngine, make_config

IMPORT = {
    "mode": "import",
    "transfer_id": "transfer-1",
    "first_token": False,
    "exporter": {"worker_id": "p", "ranks": [{"rank": 0, "address": "ipc://p", "epoch": "e"}]},
}
# A token takes a millisecond, and what every step costs is as much as that of 10 tokens.
COST = StepCost(fixed_s=0.01, prefill_token_s=0.001, decode_token_s=0.001)

REMOTE = RequestStatus.WAITING_FOR_REMOTE_KVS

Start = Callable[..., FakeEngine]


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def start(*, asynchronous: bool = False, num_blocks: int = 1000, **scheduling: Any) -> FakeEngine:
        config = make_config(tmp_path, **scheduling)
        engine = FakeEngine.start(config, asynchronous=asynchronous, num_blocks=num_blocks)
        engine.scheduler._costs._cost = COST
        engine.scheduler._costs._overrun = 1.0
        engine.scheduler._costs.observe = lambda *_: None  # type: ignore[method-assign]
        return engine

    return start


def test_a_short_prompt_goes_before_a_long_one_that_then_goes_on_where_it_was(start: Start, asynchronous: bool) -> None:
    engine = start(asynchronous=asynchronous)
    free = engine.free_blocks
    long = engine.add("long", 2000, ttft_s=30.0)
    assert engine.step() == {"long": BUDGET}
    engine.add("short", 100, ttft_s=1.0)
    assert engine.step() == {"short": 100}
    assert engine.tokens["short"] == 1
    assert long.num_computed_tokens == BUDGET
    assert [step["long"] for step in engine.run()] == [BUDGET, BUDGET, 2000 - 3 * BUDGET]
    assert engine.free_blocks == free
    assert long.num_preemptions == 0


def test_in_order_of_arrival_vllm_decides(start: Start) -> None:
    engine = start(chunk_order="arrival")
    engine.add("long", 700, ttft_s=30.0)
    engine.add("short", 100, ttft_s=1.0)
    assert engine.step() == {"long": BUDGET}
    assert engine.step() == {"long": 700 - BUDGET, "short": 100}


def test_waiting_prompts_are_tried_by_priority_and_deadline(start: Start, asynchronous: bool) -> None:
    engine = start(asynchronous=asynchronous)
    engine.add("late", 300, ttft_s=9.0)
    engine.add("soon", 300, ttft_s=2.0)
    engine.add("first", 300, ttft_s=20.0, priority=-1)
    assert [list(step) for step in engine.run()] == [["first"], ["soon"], ["late"]]


def test_with_vllms_priority_policy_the_order_is_ours_all_the_same(start: Start) -> None:
    engine = start(policy="priority")
    engine.add("late", 300, ttft_s=9.0)
    engine.add("soon", 300, ttft_s=2.0)
    assert [list(step) for step in engine.run()] == [["soon"], ["late"]]


def test_two_steps_in_flight_do_not_disturb_the_order(start: Start) -> None:
    engine = start(asynchronous=True)
    engine.add("long", 2000, ttft_s=30.0, max_tokens=3)
    first = engine.scheduler.schedule()
    engine.add("short", 100, ttft_s=1.0, max_tokens=3)
    second = engine.scheduler.schedule()
    engine.answer(first)
    third = engine.scheduler.schedule()
    engine.answer(second)
    assert second.num_scheduled_tokens == {"short": 100}
    assert third.num_scheduled_tokens["short"] == 1
    engine.answer(third)
    engine.run()
    assert engine.tokens == {"long": 3, "short": 3}
    assert not engine.scheduler._begun


def test_a_prompt_that_stepped_aside_can_be_aborted(start: Start, asynchronous: bool) -> None:
    engine = start(asynchronous=asynchronous)
    free = engine.free_blocks
    engine.add("long", 2000, ttft_s=30.0)
    engine.step()
    engine.add("short", 100, ttft_s=1.0)
    output = engine.scheduler.schedule()
    engine.abort("long")
    engine.answer(output)
    engine.run()
    assert engine.free_blocks == free
    assert not engine.scheduler.running
    assert len(engine.scheduler._urgencies) == 0


def test_an_error_within_a_step_leaves_everybody_where_he_was(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    engine.add("long", 2000, ttft_s=30.0)
    engine.step()
    engine.add("short", 100, ttft_s=1.0)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr(KVCacheManager, "allocate_slots", fail)
        with pytest.raises(RuntimeError):
            engine.step()
    assert [r.request_id for r in engine.scheduler.running] == ["long"]
    assert [r.request_id for r in engine.scheduler.waiting] == ["short"]
    assert engine.scheduler._shares is None


def test_nothing_is_held_back_for_a_prompt_whose_blocks_others_will_need(start: Start) -> None:
    engine = start(num_blocks=2000 // BLOCK + 6)
    engine.add("long", 2000, ttft_s=30.0)
    engine.step()
    # The long one has only begun, but what it will need is spoken for.
    engine.add("late", 1500, ttft_s=0.5)
    assert engine.step() == {"long": BUDGET}
    engine.run()
    assert engine.tokens == {"long": 1, "late": 1}


def test_who_was_not_admitted_is_doubted_for_a_while(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    engine.add("long", 8000, ttft_s=30.0)
    engine.step()
    engine.add("short", 100, ttft_s=1.0)
    allocate = KVCacheManager.allocate_slots
    with monkeypatch.context() as patch:
        patch.setattr(
            KVCacheManager,
            "allocate_slots",
            lambda cache, request, *rest, **named: (
                None if request.request_id == "short" else allocate(cache, request, *rest, **named)
            ),
        )
        assert engine.step() == {}
        assert [engine.step() for _ in range(DOUBTED_STEPS)] == [{"long": BUDGET}] * DOUBTED_STEPS
    assert engine.step() == {"short": 100}


def test_no_place_is_made_where_all_are_taken(start: Start) -> None:
    engine = start(max_num_seqs=1)
    engine.add("long", 1000, ttft_s=30.0)
    engine.step()
    engine.add("short", 100, ttft_s=1.0)
    assert engine.step() == {"long": 1000 - BUDGET}
    assert engine.step() == {"short": 100}


def test_the_least_urgent_prompt_is_preempted_when_blocks_run_out(start: Start) -> None:
    engine = start(num_blocks=80, scheduler_reserve_full_isl=False)
    free = engine.free_blocks
    engine.add("long", 1100, ttft_s=60.0)
    engine.step()
    urgent = engine.add("urgent", 900, ttft_s=1.0)
    engine.step()
    engine.run(20)
    assert engine.tokens == {"long": 1, "urgent": 1}
    assert urgent.num_preemptions == 0
    assert engine.free_blocks == free


def test_a_prompt_that_is_cached_takes_no_more_of_a_step_than_it_needs(start: Start) -> None:
    engine = start()
    words = [n % 97 for n in range(1600)]
    engine.add("before", 1600, prompt=words)
    engine.run()
    engine.scheduler._costs._cost = StepCost(fixed_s=1.0, prefill_token_s=0.001, decode_token_s=0.001)
    engine.add("long", 3000, ttft_s=30.0)
    engine.step()
    engine.add("again", 1601, ttft_s=9.0, prompt=[*words, 1, 2, 3])
    assert engine.step() == {"again": 3, "long": BUDGET - 3}


def test_prompt_tokens_beside_decodes_fit_into_the_target(start: Start, asynchronous: bool) -> None:
    engine = start(asynchronous=asynchronous, itl_s=0.1)
    engine.add("chat", 20, ttft_s=1.0, max_tokens=50)
    engine.step()
    engine.add("long", 1000, ttft_s=3.0)
    # 0.9 * 100 ms less 10 for the step and 1 for the decode.
    assert [engine.step() for _ in range(5)] == [{"chat": 1, "long": 79}] * 5
    engine.add("strict", 20, urgency={"ttft_left_s": 0.1, "itl_s": 0.04}, max_tokens=50)
    assert engine.step() == {"chat": 1, "strict": 20, "long": 59}
    assert engine.step() == {"chat": 1, "strict": 1, "long": 24}
    engine.abort("strict")
    engine.abort("chat")
    assert engine.step() == {"long": BUDGET}


def test_a_prompt_that_has_time_leaves_room_for_stricter_ones(start: Start) -> None:
    engine = start()
    engine.add("report", 1000, urgency={"ttft_left_s": 30.0, "longest_step_s": 0.16})
    # 160 ms less 10 for the step.
    assert engine.step() == {"report": 150}
    engine.add("chat", 100, ttft_s=1.0)
    assert engine.step() == {"chat": 100}
    assert engine.step() == {"report": 150}


def test_the_bound_holds_in_order_of_arrival_too(start: Start) -> None:
    engine = start(chunk_order="arrival", itl_s=0.1)
    engine.add("chat", 20, max_tokens=50)
    engine.step()
    engine.add("long", 1000)
    assert engine.step() == {"chat": 1, "long": 79}


def test_a_prompt_goes_on_beside_decodes_that_miss_their_target_already(start: Start) -> None:
    engine = start(itl_s=0.001)
    engine.add("chat", 20, max_tokens=50)
    engine.step()
    engine.add("long", 100)
    assert engine.step() == {"chat": 1, "long": MIN_PREFILL_TOKENS}


def test_decodes_run_in_every_step_however_long_the_prompt_before_them(start: Start) -> None:
    engine = start()
    engine.add("long", 4000, ttft_s=0.1)
    engine.step()
    engine.add("chat", 20, ttft_s=0.01, max_tokens=4)
    steps = [engine.step() for _ in range(5)]
    assert [step.get("chat") for step in steps] == [20, 1, 1, 1, None]
    assert [step.get("long") for step in steps] == [70, BUDGET - 1, BUDGET - 1, BUDGET - 1, BUDGET]


def test_an_import_reserves_its_blocks_while_a_prompt_is_computed(start: Start) -> None:
    engine = start()
    engine.add("long", 3000, ttft_s=1.0)
    engine.step()
    imported = engine.add("imported", 320, ttft_s=9.0, max_tokens=3, transfer=IMPORT)
    engine.add("short", 100, ttft_s=20.0)
    assert engine.step() == {"long": BUDGET - 1}
    assert imported.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    output = engine.scheduler.schedule()
    report = RankReport([ClosedRequest("imported", None, loaded=True)])
    engine.answer(output, KVConnectorOutput(finished_recving={"imported"}, kv_connector_worker_meta=report))
    assert engine.step() == {"imported": 1, "long": BUDGET - 1}


def test_an_import_that_failed_is_computed_here(start: Start) -> None:
    engine = start()
    engine.add("imported", 320, ttft_s=9.0, transfer=IMPORT)
    assert engine.step() == {}
    engine.add("long", 3000, ttft_s=1.0)
    blocks = set(engine.scheduler.kv_cache_manager.get_block_ids("imported")[0])
    report = RankReport([ClosedRequest("imported", None, loaded=True)])
    output = engine.scheduler.schedule()
    engine.answer(
        output,
        KVConnectorOutput(finished_recving={"imported"}, invalid_block_ids=blocks, kv_connector_worker_meta=report),
    )
    assert engine.step() == {"imported": 320}
    engine.run()
    assert engine.tokens == {"imported": 1, "long": 1}


@pytest.mark.parametrize("chunk_order", ["deadline", "arrival"])
def test_whatever_comes_and_goes_all_end_and_no_block_is_lost(
    start: Start, asynchronous: bool, chunk_order: str
) -> None:
    dice = random.Random(4)
    engine = start(asynchronous=asynchronous, num_blocks=80, max_num_seqs=4, itl_s=0.1, chunk_order=chunk_order)
    free, loading, in_flight = engine.free_blocks, set[str](), []
    for at in range(400):
        if dice.random() < 0.15 and at < 300:
            engine.add(
                f"r{at}",
                dice.choice([5, 40, 200, 900]),
                dice.choice([0.1, 3.0, 60.0]),
                priority=dice.choice([-1, 0, 0, 1]),
                max_tokens=dice.choice([1, 1, 20]),
                transfer={**IMPORT, "transfer_id": f"transfer-{at}"} if dice.random() < 0.3 else None,
            )
        if dice.random() < 0.03 and engine.scheduler.requests:
            engine.abort(dice.choice(sorted(engine.scheduler.requests)))
        in_flight.append(engine.scheduler.schedule())
        if asynchronous and len(in_flight) < 2:
            continue
        # Also of those that were aborted meanwhile, whose blocks are kept until the import ends.
        waiting = {r.request_id for r in engine.scheduler.requests.values() if r.status == REMOTE or r.is_finished()}
        loading = {r for r in waiting if dice.random() < 0.4} - engine.scheduler.finished_recving_kv_req_ids
        lost = {
            b for r in loading if dice.random() < 0.3 for b in engine.scheduler.kv_cache_manager.get_block_ids(r)[0]
        }
        report = RankReport([ClosedRequest(r, None, loaded=True) for r in loading])
        engine.answer(
            in_flight.pop(0),
            KVConnectorOutput(finished_recving=loading, invalid_block_ids=lost, kv_connector_worker_meta=report),
        )
    assert not engine.scheduler.requests
    assert engine.free_blocks == free
    assert len(engine.tokens) > 20


def test_nonsense_about_urgency_is_ignored(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="twinpool.prefill")  # something that vLLM imports raises the root's level
    engine = start()
    for at, nonsense in enumerate(
        [
            "soon",
            {"ttft_left_s": "soon"},
            {"priority": 1.5},
            {"itl_s": -1},
            {"longest_step_s": 0},
            {"ttft_left_s": float("nan")},
        ]
    ):
        engine.add(f"odd-{at}", 50, urgency=nonsense)
    engine.run()
    assert sum(engine.tokens.values()) == 6
    assert caplog.text.count("urgency_ignored") == 6


def test_steps_are_measured_from_where_they_begin(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(asynchronous=True)
    seen: list[tuple[int, int, float, float]] = []
    monkeypatch.setattr(engine.scheduler._costs, "observe", lambda *step: seen.append(step))
    engine.add("a", 700)
    clock = iter([10.0, 11.0, 12.0, 15.0])
    monkeypatch.setattr(vllm_chunk_scheduler, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    first, second = engine.scheduler.schedule(), engine.scheduler.schedule()
    engine.answer(first)
    engine.answer(second)
    assert seen == [(512, 0, 2.0, 512 * 256), (188, 0, 3.0, 188 * (512 + 94))]


def test_engines_get_the_class_that_suits_how_vllm_schedules() -> None:
    for path, expected in ((vllm_engine.SCHEDULER, ChunkScheduler), (vllm_engine.ASYNC_SCHEDULER, AsyncChunkScheduler)):
        config = SchedulerConfig(max_model_len=10, is_encoder_decoder=False, max_num_batched_tokens=10, max_num_seqs=1)
        config.scheduler_cls = path
        assert config.get_scheduler_cls() is expected
    assert issubclass(AsyncChunkScheduler, AsyncScheduler)
    assert AsyncChunkScheduler.__mro__.index(ChunkScheduler) < AsyncChunkScheduler.__mro__.index(AsyncScheduler)


def test_vllms_scheduler_works_as_ours_relies_on() -> None:
    source = inspect.getsource(Scheduler.schedule)
    hook = "self._reserve_prefill_lookahead("
    assert source.count(hook) == 2
    running, waiting = source.split("# Next, schedule the WAITING requests.")
    for part, skipped in ((running, "continue"), (waiting, "break")):
        after = part.split(hook, 1)[1].split("if num_new_tokens == 0:", 1)[1]
        assert next(line.strip() for line in after.splitlines() if line.strip() in ("continue", "break")) == skipped
    assert list(inspect.signature(Scheduler._reserve_prefill_lookahead).parameters) == [
        "self", "request", "num_computed_tokens", "num_new_tokens",
    ]  # fmt: skip
    assert waiting.index("self.kv_holding_waiting") < waiting.index("request_queue = self.waiting")
    assert "num_running >= self.max_num_active_reqs" in waiting
    assert "full_sequence_must_fit=self.scheduler_reserve_full_isl" in waiting
    assert "preempted_req = self.running[-1]" in running
    blocked = inspect.getsource(Scheduler._is_blocked_waiting_status)
    assert set(re.findall(r"RequestStatus\.(\w+)", blocked)) == {
        "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", "WAITING_FOR_REMOTE_KVS", "WAITING_FOR_STREAMING_REQ",
    }  # fmt: skip
