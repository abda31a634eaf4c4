import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.terminal.commands import app
from lab.planner.command import PlanError, parse_workload


def plan(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plan", *arguments])
    return done.exit_code, done.output


def test_a_plan_is_printed_and_written(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    code, out = plan(
        "--model", "llama-3.1-70b", "--gpu", "h100", "--gpus", "16", "--workload", "summary", "--ttft", "2",
        "--json", str(file),
    )  # fmt: skip
    assert code == 0, out
    assert "320.0 KiB per token" in out
    assert "leave no room" in out
    numbers = json.loads(file.read_text())
    assert numbers["pools"]["prefill"]["replicas"] >= 1
    assert numbers["ratio"] > 0
    assert numbers["verdict"] in out.replace("\n", " ") or numbers["verdict"][:20] in out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model", "llama-3.1-8b", "--gpu", "h100"], "--gpus"),
        (["--model", "llama-3.1-8b", "--gpu", "v100", "--gpus", "2"], "v100"),
        (["--model", "llama-9", "--gpu", "h100", "--gpus", "2"], "llama-9"),
        (["--model", "smollm2-135m", "--gpu", "h100", "--gpus", "2", "--workload", "long"], "context"),
        (["--model", "llama-3.1-8b", "--gpu", "h100", "--gpus", "2", "--workload", "novel"], "novel"),
    ],
)
def test_what_cannot_be_planned_is_said(arguments: list[str], complaint: str) -> None:
    code, out = plan(*arguments)
    assert code == 2
    assert complaint in out


def test_workloads_are_named_or_spelled_out() -> None:
    assert parse_workload("prompt=2000,output=300,rate=5") == (2000, 300, 5.0)
    assert parse_workload("code,rate=2") == (2000, 30, 2.0)
    with pytest.raises(PlanError, match="no number"):
        parse_workload("prompt=x,output=1")
    with pytest.raises(PlanError, match="at least one token"):
        parse_workload("prompt=5")
