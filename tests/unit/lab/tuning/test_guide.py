from pathlib import Path

import msgspec
import pytest
from click.testing import Result
from typer.testing import CliRunner

from cluster.terminal.commands import app
from lab.experiments.results import Held, Results, Run, StepShape
from lab.load.client import Record
from lab.load.summary import summarize
from lab.load.work import parse_work
from lab.tuning import arithmetic
from lab.tuning.guide import BEGIN, NOT_YET, measured_part, write_guide
from lab.tuning.measured import measured_table

GUIDE = Path(__file__).parents[4] / "docs" / "tuning.md"


@pytest.fixture(scope="module")
def written() -> str:
    return write_guide(measured_part(GUIDE.read_text()))


def run(arm: str, held: Held | None) -> Run:
    work = parse_work("chat=1/s,256+5,ttft=1,itl=0.1,shared=128")
    records = [Record("chat", i, 0, 256, 5, i, i, 0.3, [0.08, 0.04, 0.04, 0.04], 0.5, 5, 200) for i in range(10)]
    shapes = [StepShape(0.0, 1), StepShape(1.0, 7, waiting=2), StepShape(2.0, 3)]
    return Run(arm, "", 1.0, 1, [work], summarize([work], records, 10), records, shapes, 12_000_000, held=held)


def results() -> Results:
    held = Held(memory_bytes=2_400_000_000, kv_blocks=20, preemptions=3, prompt_tokens=2000, cached_tokens=500)
    runs = [run("as it comes", held), run("fp8", None)]
    return Results("t", "", "a model", "2 cores, x86, load 0.1 before", "today", runs, {"odd": "it died\nlog"})


def tune(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["lab", "tune", *arguments])


def test_the_guide_in_docs_is_what_the_command_writes(written: str) -> None:
    assert GUIDE.read_text() == written, "run: twinpool lab tune --out docs/tuning.md"


def test_every_setting_has_a_section_with_numbers(written: str) -> None:
    sections = written.split("\n## ")[1:-1]
    names = [section.splitlines()[0] for section in sections]
    assert names == [
        "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size", "kv_cache_dtype",
        "Prefix caching", "Chunked prefill",
    ]  # fmt: skip
    assert all("| --- |" in section for section in sections[:-1])
    assert "{{" not in written


def test_hand_calculations_are_in_the_tables() -> None:
    assert "| auto (bf16) | 320 |" in arithmetic.kv_dtypes()
    assert "| fp8 | 160 |" in arithmetic.kv_dtypes()
    assert "| llama-3.1-70b | 1 | 141 | does not fit |" in arithmetic.ranks()


def test_a_measured_arm_is_a_row_and_one_that_failed_is_named() -> None:
    text = measured_table(results())
    assert text.startswith("a model on 2 cores, x86, today; 1 chats per second of 256 tokens in, 128 of them the same")
    row = "| as it comes | 20 | 2.4 | 3 | 25 % | 7 | 2 | 300 / 300 | 40.0 / 80.0 | 80.0 | 12 | 100 % |"
    assert row in text
    assert "| fp8 | - | - | - | - | 7 |" in text
    assert text.endswith("odd did not run: it died")


def test_a_run_replaces_the_measured_table_and_without_one_it_stays(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_bytes(msgspec.json.encode(results()))
    out = tmp_path / "tuning.md"
    assert tune("--out", str(out)).exit_code == 0
    assert NOT_YET in out.read_text()
    assert tune(str(tmp_path), "--out", str(out)).exit_code == 0
    measured = out.read_text()
    assert "| as it comes |" in measured
    assert tune("--out", str(out)).exit_code == 0
    assert out.read_text() == measured
    assert measured.count(BEGIN) == 1


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    done = tune(str(tmp_path), "--out", str(tmp_path / "x.md"))
    assert done.exit_code == 2
    assert "cannot read" in done.output
    assert not (tmp_path / "x.md").exists()
