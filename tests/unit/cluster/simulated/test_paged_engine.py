import math
import random
from typing import Any

import pytest

from cluster.config import SimulationConfig
from cluster.prefix_events.block_hashes import root
from cluster.prefix_events.cached_blocks import CachedBlocks
from cluster.simulated.engine.blocks import BlockPool, block_hashes
from cluster.simulated.engine.cost import Chunk, CostModel
from cluster.simulated.engine.events import (
    EngineEvent,
    ExportAborted,
    ExportFinished,
    ExportProgressed,
    ExportStarted,
    ImportOpened,
    ImportPlaced,
)
from cluster.simulated.engine.paged_engine import SimulatedEngine, Step
from cluster.simulated.engine.vllm_frames import Finish, Output, Request, Sampling
from cluster.simulated.engine.vocabulary import Vocabulary, state_after, state_of

WORDS = tuple(range(50, 80))
EXPORTER = {"ranks": [{"rank": 0, "address": "ipc://x", "epoch": "e"}]}


class Engine:
    """An engine and all that it ever said."""

    def __init__(self, **simulation: Any) -> None:
        given = {"num_blocks": 32, "block_size": 4, "max_num_batched_tokens": 16, "eos_every": 0, **simulation}
        self.config = SimulationConfig(**given)
        vocabulary = Vocabulary(WORDS, self.config.eos_every)
        self.engine = SimulatedEngine(self.config, 128, CostModel(self.config, "w"), vocabulary)
        self.answers: dict[str, list[int]] = {}
        self.ends: dict[str, int] = {}
        self.firsts: dict[str, Output] = {}
        self.events: list[EngineEvent] = []
        self.now_s = 0.0

    def add(self, name: str, prompt: list[int], transfer: dict[str, Any] | None = None, **sampling: Any) -> None:
        extra = {"kv_transfer_params": transfer} if transfer else None
        extra = {**(extra or {}), **sampling.pop("extra", {})} or None
        params = Sampling(extra_args=extra, **{"max_tokens": 4, **sampling})
        self.engine.add(Request(name, prompt, None, params, None, 0.0, None, None, None), self.now_s)

    def step(self) -> Step | None:
        """One step; checks what must hold after each."""
        step = self.engine.plan(self.now_s)
        if step is not None:
            assert sum(n for _, n in step.work) <= self.config.max_num_batched_tokens
            assert len(step.work) <= self.config.max_num_seqs
            self.now_s += step.seconds
            for output in self.engine.finish(step, self.now_s):
                self.firsts.setdefault(output.request_id, output)
                self.answers.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self.ends[output.request_id] = output.finish_reason
        self.events += self.engine.events
        self.engine.events = []
        blocks = self.engine.block_count()
        assert blocks.free + blocks.used + blocks.leased == blocks.total == self.config.num_blocks
        return step

    def run(self) -> None:
        """Until there is nothing to do."""
        while self.step():
            pass

    def chunks(self, step: Step | None) -> dict[str, int]:
        return {sequence.request_id: n for sequence, n in step.work} if step else {}


def answer(prompt: list[int], num_tokens: int) -> list[int]:
    return Vocabulary(WORDS, 0).continuation(prompt, num_tokens)


def export(transfer_id: str = "t") -> dict[str, Any]:
    return {"mode": "export", "transfer_id": transfer_id, "decode_wants_first_token": True}


def imported(first_token: bool, transfer_id: str = "t") -> dict[str, Any]:
    return {"mode": "import", "transfer_id": transfer_id, "first_token": first_token, "exporter": EXPORTER}


def test_the_next_token_depends_on_all_tokens_and_nothing_else() -> None:
    assert state_after(state_of([1, 2]), 3) == state_of([1, 2, 3]) != state_of([2, 1, 3])
    whole = answer([1, 2, 3], 10)
    assert answer([1, 2, 3, *whole[:4]], 6) == whole[4:]


def test_an_answer_ends_where_the_end_token_comes() -> None:
    vocabulary = Vocabulary(WORDS, 5)
    ends = [len(vocabulary.continuation([i], 1000, eos_token_id=2)) for i in range(200)]
    assert 3 < sum(ends) / len(ends) < 8


def test_long_prompts_are_computed_in_chunks_while_others_decode() -> None:
    engine = Engine()
    engine.add("short", [1, 2, 3], max_tokens=9)
    engine.step()
    engine.add("long", list(range(40)))
    assert [engine.chunks(engine.step()) for _ in range(3)] == [
        {"short": 1, "long": 15},
        {"short": 1, "long": 15},
        {"short": 1, "long": 10},
    ]
    engine.run()
    assert engine.answers == {"short": answer([1, 2, 3], 9), "long": answer(list(range(40)), 4)}
    assert engine.ends == {"short": Finish.LENGTH, "long": Finish.LENGTH}


def test_every_computed_token_is_counted_chunk_by_chunk() -> None:
    engine = Engine()
    engine.add("long", list(range(40)), max_tokens=3)
    counts = []
    while engine.step():
        counts.append(engine.engine.tokens_computed)
    assert counts == [16, 32, 40, 41, 42]


def test_an_urgent_prompt_overtakes_one_that_is_being_computed() -> None:
    engine = Engine()
    engine.add("late", list(range(60)), extra={"twinpool": {"ttft_left_s": 9.0}})
    engine.step()
    engine.add("early", list(range(100, 116)), extra={"twinpool": {"ttft_left_s": 1.0}})
    engine.step()
    assert list(engine.chunks(engine.step())) == ["early", "late"]


def test_sequences_that_do_not_fit_wait_and_those_that_grow_too_large_start_over() -> None:
    engine = Engine(num_blocks=8)
    prompts = {name: [index] * 9 for index, name in enumerate("abcd")}
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=12)
    engine.run()
    assert engine.answers == {name: answer(prompt, 12) for name, prompt in prompts.items()}
    assert engine.engine.block_count().free == 8


def test_a_request_that_can_never_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit into 4 KV blocks"):
        Engine(num_blocks=4).add("r", list(range(17)))


def test_blocks_of_a_known_prompt_cost_nothing() -> None:
    engine = Engine()
    engine.add("first", list(range(40)), max_tokens=1)
    engine.run()
    engine.add("again", [*range(36), 99, 98], max_tokens=1)
    assert engine.chunks(engine.step()) == {"again": 2}
    stats = engine.firsts["again"].prefill_stats
    assert stats is not None
    assert (stats.num_cached_tokens, stats.num_computed_tokens) == (36, 2)
    assert engine.engine.reset_prefix_cache()
    engine.add("third", list(range(40)), max_tokens=1)
    assert engine.chunks(engine.step()) == {"third": 16}


def test_an_export_is_told_of_chunk_by_chunk_and_leased_until_it_is_released() -> None:
    engine = Engine()
    engine.add("r", list(range(20)), export(), max_tokens=1)
    engine.run()
    state = state_of(list(range(20)))
    assert engine.events == [
        ExportStarted("t", 20, state),
        ExportProgressed("t", 0),
        ExportProgressed("t", 16),
        ExportProgressed("t", 20),
        ExportFinished("t", answer(list(range(20)), 1)[0]),
    ]
    assert (engine.engine.block_count().used, engine.engine.block_count().leased) == (0, 5)
    engine.engine.end_lease("t")
    assert engine.engine.block_count().free == 32


def test_an_export_that_ends_in_a_stop_leaves_no_lease() -> None:
    engine = Engine()
    engine.add("r", [1, 2, 3], export(), max_tokens=1, stop_token_ids=answer([1, 2, 3], 1))
    engine.run()
    assert engine.events[-1] == ExportAborted("t", "the prefill ended as stop")
    assert engine.engine.block_count().leased == 0


@pytest.mark.parametrize(("loaded", "first_chunk"), [(True, 1), (False, 9)])
def test_an_import_goes_on_with_the_second_token(loaded: bool, first_chunk: int) -> None:
    engine = Engine()
    prompt = [7] * 8
    engine.add("r", [*prompt, 0], imported(first_token=True), max_tokens=3)
    assert engine.step() is None
    assert [type(event) for event in engine.events] == [ImportOpened, ImportPlaced]
    assert engine.engine.block_count().used == 3
    engine.engine.close_import("t", 8 if loaded else 0, answer(prompt, 1)[0])
    assert engine.chunks(engine.step()) == {"r": first_chunk}
    engine.run()
    assert engine.answers["r"] == answer(prompt, 4)[1:]


def test_in_exact_mode_the_last_prompt_token_is_computed_again() -> None:
    engine = Engine()
    engine.add("r", [7] * 8, imported(first_token=False))
    engine.step()
    engine.engine.close_import("t", 8, None)
    assert engine.chunks(engine.step()) == {"r": 1}
    engine.run()
    assert engine.answers["r"] == answer([7] * 8, 4)


def test_the_first_tokens_before_min_tokens_do_not_end_the_answer() -> None:
    engine = Engine(eos_every=2)
    engine.add("r", [1, 2, 3], max_tokens=50, min_tokens=20, eos_token_id=2)
    engine.run()
    assert len(engine.answers["r"]) > 20
    assert 2 not in engine.answers["r"][:20]
    assert engine.ends["r"] == Finish.STOP


def test_whatever_comes_in_whatever_order_every_block_comes_back() -> None:
    rng = random.Random(1)
    engine = Engine(num_blocks=24, max_num_seqs=5)
    open_transfers: set[str] = set()
    prompts: dict[str, list[int]] = {}
    for number in range(400):
        name, prompt = f"r{number}", [rng.randrange(3) for _ in range(rng.randint(2, 30))]
        match rng.randrange(4):
            case 0:
                engine.add(name, prompt, export(name), max_tokens=1)
            case 1:
                engine.add(name, [*prompt, 0], imported(True, name))
            case 2:
                engine.add(name, prompt, max_tokens=rng.randint(1, 40))
                prompts[name] = prompt
            case _:
                ids = engine.engine.request_ids
                if ids:
                    gone = rng.choice(ids)
                    engine.engine.abort(gone)
                    prompts.pop(gone, None)
        for _ in range(rng.randrange(4)):
            engine.step()
        for event in engine.events:
            if isinstance(event, ImportPlaced | ExportFinished):
                open_transfers.add(event.transfer_id)
        engine.events.clear()
        for transfer_id in sorted(open_transfers):
            if rng.random() < 0.3:
                open_transfers.discard(transfer_id)
                engine.engine.end_lease(transfer_id)
                engine.engine.close_import(transfer_id, 0, 5)
    for _ in range(2000):
        engine.step()
        for event in engine.events:
            if isinstance(event, ImportPlaced | ExportFinished):
                open_transfers.add(event.transfer_id)
        engine.events.clear()
        for transfer_id in open_transfers:
            engine.engine.end_lease(transfer_id)
            engine.engine.close_import(transfer_id, 0, 5)
        open_transfers.clear()
        if not engine.engine.request_ids:
            break
    assert engine.engine.request_ids == []
    assert engine.engine.block_count().free == 24
    for name, prompt in prompts.items():
        assert engine.answers[name] == answer(prompt, len(engine.answers[name]))


def test_free_blocks_are_reused_from_the_end_of_the_oldest_prompt() -> None:
    pool = BlockPool(3, CachedBlocks(4, 3))
    hashes = block_hashes([1, 1, 2, 2, 3, 3], 2, 0)
    table = pool.hold((), 3)
    assert table is not None
    for block, block_hash in zip(table, hashes, strict=True):
        pool.name(block, block_hash)
    pool.give_back(table)
    assert pool.cached(hashes) == table
    taken = pool.hold((), 1)
    assert taken == [table[2]]
    assert pool.cached(hashes) == table[:2]
    assert pool.hold(table[:2], 1) is None
    assert not pool.forget_all()
    assert block_hashes([1, 1], 2, root(cache_salt="other")) != hashes[:1]


def test_costs_add_up_and_scale_and_repeat() -> None:
    config = SimulationConfig(
        prefill_tokens_per_s=1000, chunk_s=0.5, attention_s_per_pair=0.001, decode_step_s=0.1,
        decode_s_per_sequence=0.01, decode_s_per_kv_token=0.001, transfer_gb_per_s=2, time_scale=2,
    )  # fmt: skip
    cost = CostModel(config, "w")
    assert cost.step_s([], 0, 0) == 0
    assert cost.step_s([], 3, 50) == pytest.approx((0.1 + 0.03 + 0.05) / 2)
    assert cost.step_s([Chunk(100, 10)], 0, 0) == pytest.approx((0.5 + 0.1 + 0.001 * 100 * 60) / 2)
    assert cost.transfer_s(4 * 10**9) == pytest.approx(1.0)
    assert CostModel(config.model_copy(update={"speed": "instant"}), "w").step_s([Chunk(100, 10)], 3, 50) == 0
    shaky = config.model_copy(update={"jitter": 0.5})
    times = [[model.step_s([], 1, 0) for _ in range(5)] for model in (CostModel(shaky, "w"), CostModel(shaky, "w"))]
    assert times[0] == times[1]
    assert len({math.floor(t * 1e9) for t in times[0]}) == 5
