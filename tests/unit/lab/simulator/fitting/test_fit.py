import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import Result
from typer.testing import CliRunner

from cluster.terminal.commands import app
from lab.experiments.results import Results, Run, Setup
from lab.load.client import Record
from lab.load.plan import plan_sessions
from lab.load.summary import summarize
from lab.load.work import parse_work
from lab.simulator.costs import FittedCosts, FittedSteps
from lab.simulator.fitting.fit import FitError, fit_costs
from lab.simulator.fitting.predict import predictions, simulate

SIDE_BY_SIDE = Setup(512, replicas=1)
TWO_POOLS = Setup(512, num_prefill=1, num_decode=1, remote_min_tokens=64)
# What one core makes of a model of 135M weights, about.
ENGINE = FittedSteps(base_s=0.027, token_s=0.0005, pair_s=6e-7, sequence_s=0.001, kv_token_s=3e-6)
TRUTH = {
    "side by side": FittedCosts(ENGINE, first_token_s=0.02, handover_s=0.0),
    "two pools": FittedCosts(ENGINE, first_token_s=0.05, handover_s=0.012),
}
SETUPS = {"side by side": SIDE_BY_SIDE, "two pools": TWO_POOLS}
CLASSES = [
    parse_work("chat=0.35/s,128+64,ttft=1,itl=0.1"),
    parse_work("mail=0.1/s,500+40,ttft=3,itl=0.2"),
    parse_work("report=0.1/s,1500+16,ttft=8,itl=0.2"),
]


def measured(kind: str, rate: float, seed: int, noise: float = 0.0, seconds: float = 150) -> list[Record]:
    """What clients of servers with known costs see, if steps take a little more or less at random."""
    classes = [replace(work, rate_per_s=work.rate_per_s * rate) for work in CLASSES]
    records = simulate(TRUTH[kind], SETUPS[kind], classes, plan_sessions(classes, seconds, seed))
    rng = random.Random(seed)
    for record in records:
        record.gaps_s = [gap * rng.lognormvariate(0, noise) for gap in record.gaps_s]
        record.ttft_s = (record.ttft_s or 0.0) * rng.lognormvariate(0, noise)
        if noise and rng.random() < 0.1:
            record.gaps_s[3] += 0.2  # somebody else had the core
    return records


def results(kind: str, noise: float) -> Results:
    runs = []
    for rate, seed in ((0.8, 1), (1.2, 7)):
        records = measured(kind, rate, seed, noise)
        summary = summarize(CLASSES, records, 150)
        runs.append(Run(kind, "", rate, seed, CLASSES, summary, records, setup=SETUPS[kind]))
    return Results("t", "", "", "", "", runs)


@pytest.mark.parametrize("kind", SETUPS)
def test_a_fit_finds_the_costs_that_made_the_records(kind: str) -> None:
    found, truth = fit_costs(measured(kind, 0.8, 1), SETUPS[kind]), TRUTH[kind]
    assert found.engine.base_s + found.engine.sequence_s == pytest.approx(ENGINE.base_s + ENGINE.sequence_s, rel=0.03)
    assert found.engine.token_s == pytest.approx(ENGINE.token_s, rel=0.1)
    assert found.engine.pair_s == pytest.approx(ENGINE.pair_s, rel=0.1)
    for decodes, context in ((1, 200), (4, 300), (3, 900)):
        assert found.engine.step_s(decodes, context) == pytest.approx(ENGINE.step_s(decodes, context), rel=0.03)
    for num_tokens in (128, 800, 3000):
        alone_s = ENGINE.prefill_s(num_tokens, 512) + truth.first_token_s
        assert found.engine.prefill_s(num_tokens, 512) + found.first_token_s == pytest.approx(alone_s, rel=0.05)
    assert found.handover_s == pytest.approx(truth.handover_s, abs=0.01)


@pytest.mark.parametrize("kind", SETUPS)
def test_costs_of_one_load_foretell_another(kind: str) -> None:
    """The bounds that the simulator is held to: TTFT p50 within 15 %, ITL p50 within 10 %, attained within 10."""
    found, why_not = predictions(results(kind, noise=0.05))
    assert not why_not
    others = {each.kind: each for each in found if not each.fitted_on}
    assert set(others) == {"chat", "mail", "report", "all"}
    for other in others.values():
        for (was, said), bound in ((other.ttft_p50_s, 0.15), (other.itl_p50_s, 0.1)):
            assert was is not None
            assert said == pytest.approx(was, rel=bound)
    assert others["all"].attained[1] == pytest.approx(others["all"].attained[0], abs=0.1)


def test_what_tells_too_little_is_said() -> None:
    few = measured("two pools", 0.5, 1, seconds=4)
    with pytest.raises(FitError, match="met no other prompt"):
        fit_costs(few, TWO_POOLS)
    run = Run("a", "", 1.0, 1, CLASSES, summarize(CLASSES, few, 4), few, setup=TWO_POOLS)
    found, why_not = predictions(Results("t", "", "", "", "", [run, run]))
    assert found == []
    assert "lower rate" in why_not["a"]


def test_a_replica_that_got_no_request_is_no_problem() -> None:
    odd = [replace_session(record, 2 * i + 1) for i, record in enumerate(measured("side by side", 0.8, 1))]
    assert fit_costs(odd, Setup(512, replicas=2)).engine.base_s == pytest.approx(ENGINE.base_s, rel=0.1)


def replace_session(record: Record, session: int) -> Record:
    record.session = session
    return record


def simulated(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["lab", "simulate", *arguments], env={"COLUMNS": "200"})


def test_the_command_compares_an_experiments_runs_and_plays_another_load(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_bytes(msgspec.json.encode(results("two pools", 0.02)))
    done = simulated("--fit", str(tmp_path), "--json", str(tmp_path / "out.json"))
    assert done.exit_code == 0, done.output
    assert "fitted to it" in done.output
    assert len(msgspec.json.decode((tmp_path / "out.json").read_bytes())) == 2 * 4
    done = simulated("--fit", str(tmp_path), "-w", "chat=2/s,128+64,ttft=1,itl=0.1", "--replicas", "3")
    assert done.exit_code == 0, done.output
    assert "3 servers that cost what two pools did" in done.output


def test_the_command_reads_json_lines_of_a_load(tmp_path: Path) -> None:
    lines = tmp_path / "records.jsonl"
    lines.write_bytes(b"\n".join(map(msgspec.json.encode, measured("side by side", 0.8, 1))))
    done = simulated("--fit", str(lines), "--replicas", "1")
    assert done.exit_code == 0, done.output
    assert done.output.count("0 %)") == 2 * 4
    assert "a step takes 2" in done.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("records.jsonl",), "give --pools (1x1+1x1) or --replicas"),
        (("records.jsonl", "--replicas", "1", "--pools", "1x1+1x1"), "not both"),
        (("records.jsonl", "--gpu", "h100"), "leave --model"),
        (("missing", "--replicas", "1"), "cannot read"),
        (("odd.json",), "neither"),
    ],
)
def test_a_run_that_cannot_be_used_is_said(arguments: tuple[str, ...], complaint: str, tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_bytes(msgspec.json.encode(Record("w", 0, 0, 9, 9, 0.0, 0.0)))
    (tmp_path / "odd.json").write_text("{}")
    name, *others = arguments
    done = simulated("--fit", str(tmp_path / name), *others)
    assert done.exit_code == 2
    assert complaint in done.output


def test_a_simulation_needs_costs_from_somewhere() -> None:
    done = simulated("-w", "chat=1/s,9+9")
    assert done.exit_code == 2
    assert "--fit" in done.output
