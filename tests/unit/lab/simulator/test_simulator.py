import json
import random
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import simpy
from typer.testing import CliRunner

from cluster.terminal.commands import app
from lab.load.plan import plan_sessions, replay
from lab.load.summary import summarize
from lab.load.work import WorkClass, parse_work
from lab.planner.capacity import Workload
from lab.planner.gpus import GPUS
from lab.planner.models import MODELS
from lab.planner.plan import Asked, make_plan
from lab.planner.steps import EXPECTED, Steps
from lab.simulator.cluster import BlockNames, Incident, Outcome, Rules, SimulatedCluster
from lab.simulator.command import SimulateError, parse_incident, parse_pools
from lab.simulator.costs import PlannedCosts, Pools
from lab.simulator.request import Request
from lab.simulator.sweep import front, point_of, splits
from lab.simulator.workers import PrefillWorker, PrefixCaches
from lab.traces.trace import TraceRequest, block_hit_rate
from proxy.scheduling.slo import SloClass, Standing
from proxy.scheduling.view import RequestShape

LLAMA_70B = Asked(MODELS["llama-3.1-70b"], GPUS["h100"], 16, Workload(8000, 300, 2, 0.05))
POOLS = Pools(3, 4, 1, 4)


def cluster(pools: Pools, rules: Rules, classes: list[WorkClass]) -> SimulatedCluster:
    return SimulatedCluster(PlannedCosts(LLAMA_70B, pools), pools.num_prefill, pools.num_decode, rules, classes)


def run(
    work: str, pools: Pools = POOLS, seconds: float = 30, incidents: tuple[Incident, ...] = (), rules: Rules = Rules()
) -> tuple[Outcome, float]:
    classes = [parse_work(work)]
    outcome = cluster(pools, rules, classes).run(plan_sessions(classes, seconds, 1), incidents)
    return outcome, summarize(classes, outcome.records, outcome.seconds).total.attained or 0.0


def test_a_request_alone_takes_as_long_as_its_steps() -> None:
    outcome, _ = run("sum=0.02/s,8000+50", seconds=60)
    (record,) = outcome.records[:1]
    steps = Steps(LLAMA_70B.model, LLAMA_70B.gpu, 4, efficiency=EXPECTED)
    assert record.ttft_s == pytest.approx(steps.prefill_s(8000))
    assert record.gaps_s[5] == pytest.approx(steps.step_s(1, 8005), rel=0.01)
    assert record.tokens == 50
    assert not record.error


def test_short_prompts_in_one_step_do_not_attend_to_each_other() -> None:
    steps = Steps(LLAMA_70B.model, LLAMA_70B.gpu, 4, efficiency=EXPECTED)
    env, shape = simpy.Environment(), RequestShape(500, 1, first_token_mode=True)
    worker = PrefillWorker(env, "prefill-0", steps, 8192, lambda *_: None)
    for number in range(3):
        worker.submit(Request(str(number), "w", shape, 1, (), 0, 0.0), 0, demoted=False)
    env.run(until=10)
    attention = 3 * LLAMA_70B.model.attention_flop(500) / LLAMA_70B.model.attention_flop(1500)
    assert attention == pytest.approx(1 / 3)
    together = steps.step_s(0, 0, 1500) - worker.busy_s
    reading = 500 * steps.kv_bytes_per_token / (LLAMA_70B.gpu.memory_bytes_per_s * EXPECTED.memory)
    peak = LLAMA_70B.gpu.flop_per_s(2) * 4 * EXPECTED.of_compute(1500)
    assert together == pytest.approx(LLAMA_70B.model.attention_flop(1500) / peak * 2 / 3 + reading)


def test_a_short_prompt_does_not_wait_for_all_the_others_that_would_fit_into_its_step() -> None:
    steps = Steps(LLAMA_70B.model, LLAMA_70B.gpu, 4, efficiency=EXPECTED)
    env, done = simpy.Environment(), dict[str, float]()
    worker = PrefillWorker(env, "prefill-0", steps, 8192, lambda request, _: done.update({request.work: env.now}))
    for name, tokens, ttft_s in (("long", 30_000, 9.0), ("short", 100, 1.0)):
        shape = RequestShape(tokens, 1, True, standing=Standing(SloClass(ttft_s=ttft_s)))
        worker.submit(Request(name, name, shape, 1, (), 0, 0.0), 0, demoted=False)
    env.run(until=10)
    assert done["short"] < 0.5 * steps.step_s(0, 0, 8192)


def test_a_long_prompt_that_has_time_is_computed_in_steps_that_a_strict_one_can_wait_for() -> None:
    steps = Steps(LLAMA_70B.model, LLAMA_70B.gpu, 4, efficiency=EXPECTED)

    def short_waits_s(longest_step_s: float) -> float:
        env, done = simpy.Environment(), dict[str, float]()
        worker = PrefillWorker(env, "prefill-0", steps, 8192, lambda request, _: done.update({request.work: env.now}))
        slo = SloClass(ttft_s=9.0, longest_step_s=longest_step_s)
        worker.submit(
            Request("long", "long", RequestShape(30_000, 1, True, standing=Standing(slo)), 1, (), 0, 0.0),
            0,
            demoted=False,
        )
        env.run(until=0.01)
        strict = RequestShape(100, 1, True, standing=Standing(SloClass(ttft_s=0.5)))
        worker.submit(Request("short", "short", strict, 1, (), 0, 0.0), 0, demoted=False)
        env.run(until=10)
        assert done["long"] < 9.0
        return done["short"]

    assert short_waits_s(0.2) < 0.5 < short_waits_s(inf)


def test_goodput_breaks_down_about_where_the_plan_says() -> None:
    plan = make_plan(LLAMA_70B)
    assert (plan.num_prefill, plan.prefill_tp, plan.num_decode, plan.decode_tp) == (3, 4, 1, 4)
    _, below = run(f"sum={0.8 * plan.rate_per_s}/s,8000+300,ttft=2,itl=0.05", seconds=120)
    _, above = run(f"sum={1.5 * plan.rate_per_s}/s,8000+300,ttft=2,itl=0.05", seconds=120)
    assert below > 0.95
    assert above < 0.6


def test_the_same_seed_gives_the_same_run() -> None:
    assert run("sum=2/s,4000+60,ttft=2,itl=0.05")[0] == run("sum=2/s,4000+60,ttft=2,itl=0.05")[0]


def test_streams_go_on_when_their_worker_dies_and_no_token_is_lost() -> None:
    incidents = (Incident(5, "decode-0"), Incident(6, "prefill-1"), Incident(15, "decode-0", comes=True))
    outcome, _ = run("chat=4/s,1000+200", pools=Pools(2, 4, 2, 4), incidents=incidents)
    assert outcome.continued > 3
    assert all(not record.error and record.tokens == 200 for record in outcome.records)
    assert max(max(record.gaps_s) for record in outcome.records) > 0.1


def test_without_a_decode_worker_nothing_hangs() -> None:
    outcome, _ = run("chat=2/s,1000+50", incidents=(Incident(5, "decode-0"),), seconds=10)
    assert {record.status for record in outcome.records} == {200, 503}


def test_excess_is_rejected_if_that_is_the_policy_and_the_rest_is_in_time() -> None:
    work = "sum=12/s,8000+50,ttft=2,itl=0.05"
    queued, _ = run(work, seconds=40)
    rejecting, good = run(work, seconds=40, rules=Rules(on_overload="reject"))
    assert not any(record.status == 503 for record in queued.records)
    refused = sum(record.status == 503 for record in rejecting.records)
    assert refused > len(rejecting.records) / 3
    served = len(rejecting.records) - refused
    assert good * len(rejecting.records) > 0.9 * served


def test_shared_blocks_of_a_trace_are_computed_once_per_worker() -> None:
    shared = [TraceRequest(2.0 * i, 4096, 2, (1, 2, 3, 4, 5, 6, 7, 100 + i), 512) for i in range(20)]
    apart = [replace(request, block_ids=tuple(1000 * i + b for b in range(8))) for i, request in enumerate(shared)]
    outcomes = []
    for trace in (shared, apart):
        classes = [parse_work("trace=1/s,4096+2")]
        outcomes.append(cluster(POOLS, Rules(), classes).run(replay(trace, "trace", 1)))
    assert outcomes[0].prefill_use < outcomes[1].prefill_use / 2
    full = [replace(request, block_ids=request.block_ids[:-1]) for request in shared]
    assert 0.9 * block_hit_rate(full) <= outcomes[0].found_cached <= block_hit_rate(full)
    assert outcomes[1].found_cached == 0


def conversations(count: int, per_s: float) -> list[TraceRequest]:
    """As in Mooncake's trace: all begin alike, what turns add is long now and then, and some have many turns."""
    draw, begins_s, trace, block = random.Random(1), 0.0, list[TraceRequest](), 1
    for _ in range(count):
        begins_s += draw.expovariate(per_s)
        at_s, blocks = begins_s, [1]
        while True:
            new = min(160, max(1, round(draw.lognormvariate(2.0, 1.2))))
            blocks += range(block + 1, block + 1 + new)
            block += new
            if len(blocks) > 230:
                break
            trace.append(TraceRequest(at_s, 512 * len(blocks) + 50, 2, tuple(blocks), 512))
            if draw.random() < 0.4:
                break
            at_s += 5 + draw.expovariate(1 / 60)
    return sorted(trace, key=lambda request: request.at_s)


def test_conversations_find_nearly_everything_that_one_cache_of_all_workers_would_find() -> None:
    """Long prompts make the recent work of sixteen workers look uneven, and now and then keep the one busy that is
    wanted."""
    trace = conversations(400, 2.6)
    simulated = cluster(Pools(16, 4, 1, 4), Rules(bounded_caches=False), [parse_work("trace=1/s,4096+2")])
    outcome = simulated.run(replay(trace, "trace", 1))
    assert outcome.found_cached >= 0.93 * block_hit_rate(trace)


def test_a_prompt_that_is_left_out_of_a_full_cache_loses_its_end_first() -> None:
    caches = PrefixCaches(5 * 512)
    caches.store("prefill-0", (1, 2, 3), 512)
    caches.store("prefill-0", (4, 5, 6), 512)
    assert caches.cached_tokens(BlockNames((1, 2, 3))) == {"prefill-0": 2 * 512}
    assert caches.cached_tokens(BlockNames((4, 5, 6))) == {"prefill-0": 3 * 512}


def test_splits_use_the_gpus_and_leave_out_what_does_not_fit() -> None:
    found = list(splits(LLAMA_70B))
    assert POOLS in found
    assert all(12 <= pools.num_gpus <= 16 and min(pools.prefill_tp, pools.decode_tp) >= 4 for pools in found)


def test_the_front_holds_those_that_nobody_beats_in_both() -> None:
    classes = [parse_work("sum=2/s,8000+30,ttft=2,itl=0.05")]
    sessions = plan_sessions(classes, 20, 1)
    points = [
        point_of(pools, classes, cluster(pools, Rules(), classes).run(sessions))
        for pools in (POOLS, Pools(2, 4, 1, 8), Pools(1, 4, 3, 4))
    ]
    best = front(points)
    assert points[0] in best
    for point in points:
        assert point in best or any(p.ttft_s <= point.ttft_s and p.itl_s <= point.itl_s for p in best)


def test_what_is_asked_for_is_read_or_refused_in_a_sentence() -> None:
    assert parse_pools("3x4 + 1x8") == Pools(3, 4, 1, 8)
    assert parse_incident("+decode-3@40") == Incident(40.0, "decode-3", comes=True)
    for wrong in ("3x4", "0x4+1x4"):
        with pytest.raises(SimulateError, match="3x4"):
            parse_pools(wrong)
    with pytest.raises(SimulateError, match="dies"):
        parse_incident("proxy@3")


def test_the_command_sweeps_and_draws(tmp_path: Path) -> None:
    picture, numbers = tmp_path / "sweep.svg", tmp_path / "sweep.json"
    done = CliRunner().invoke(
        app,
        [
            "lab", "simulate", "--model", "llama-3.1-8b", "--gpu", "h100", "--sweep", "3", "-w",
            "chat=8/s,900+40,ttft=1,itl=0.03", "--seconds", "10", "--slo-factor", "0.01",
            "--slo-factor", "1", "--plot", str(picture), "--json", str(numbers),
        ],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "front" in done.output
    assert picture.read_text().startswith("<?xml")
    found = [each for each in json.loads(numbers.read_text()) if each["attained_with_limits_times"]]
    assert found
    for each in found:
        assert each["attained_with_limits_times"] == {"0.01": 0.0, "1.0": each["attained"]}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-w", "chat=1/s,9+9", "--pools", "1x1+1x1"], "no room"),
        (["-w", "chat=1/s,9+9", "--pools", "two"], "pair of pools"),
        ([], "not both"),
        (["-w", "chat=1/s,200000+9"], "context"),
        (["-w", "chat=1/s,9+9,turns=3"], "several turns"),
        (["-w", "chat=1/s,9+9", "--plot", "x.png"], "draws a sweep"),
        (["-w", "chat=1/s,9+9", "--slo-factor", "2"], "belongs to a sweep"),
        (["-w", "chat=1/s,9+9", "--unbounded-caches", "--sweep", "8"], "one cluster"),
        (["-w", "chat=1/s,9+9", "--sweep", "8", "--plot", "x.doc"], "ending in"),
    ],
)
def test_what_cannot_be_simulated_is_said(arguments: list[str], complaint: str) -> None:
    done = CliRunner().invoke(app, ["lab", "simulate", "--model", "llama-3.1-70b", "--gpu", "h100", *arguments])
    assert done.exit_code == 2
    assert complaint in done.output
