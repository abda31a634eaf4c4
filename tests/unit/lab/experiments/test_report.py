import csv
import random
import re
from pathlib import Path

import pytest

from lab.experiments.command import write_results
from lab.experiments.results import Results, Run, StepShape
from lab.load.client import Record
from lab.load.summary import summarize
from lab.load.work import parse_work

WORK = parse_work("chat=1/s,10+5,ttft=1,itl=0.1")


def run(arm: str, rate: float, slowness: float, kv_bytes: int = 0) -> Run:
    rng = random.Random(arm)
    records = [
        Record("chat", i, 0, 10, 5, i, i, slowness * rng.random(), [0.05 * slowness * rng.random()] * 4, 1.0, 5, 200)
        for i in range(20)
    ]
    records.append(Record("chat", 20, 0, 10, 5, 20, 20, error="cut off"))
    shapes = [StepShape(i / 2, i % 3, waiting=i % 2) for i in range(20)]
    summary = summarize([WORK], records, 20)
    return Run(arm, "continuous", rate, 1, [WORK], summary, records, shapes, kv_bytes)


def results(rates: tuple[float, ...]) -> Results:
    runs = [run(arm, rate, slow * rate) for rate in rates for arm, slow in (("plain <1>", 2.0), ("ours", 0.5))]
    runs[-1].kv_bytes = 12_000_000
    return Results("Two arms", "Why <not>", "a model", "2 cores", "today", runs, {"third": "no GPU"})


def test_the_report_stands_alone_and_names_everything(tmp_path: Path) -> None:
    write_results(results((1.0,)), tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 5
    assert "Two arms" in page
    assert "third did not run: no GPU" in page
    assert "plain &lt;1&gt;" in page
    assert "Why &lt;not&gt;" in page
    outside = re.findall(r"(?:src|href)=['\"]?(http[^'\"> ]*)", page)
    assert [link for link in outside if "w3.org" not in link] == []


@pytest.fixture(scope="module")
def several_rates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on two arms at three rates. Drawing takes longer than all that is asked of it."""
    directory = tmp_path_factory.mktemp("report")
    found = results((0.7, 1.0, 1.3))
    found.goodput = {"plain <1>": (1.0, 1.5), "ours": (3.0, 3.2)}
    write_results(found, directory)
    return directory


def test_goodput_is_drawn_over_the_rate_when_there_are_several(several_rates: Path) -> None:
    assert (several_rates / "report.html").read_text().count("<svg") == 5


def test_every_run_is_in_the_table(several_rates: Path) -> None:
    with (several_rates / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 * 2
    assert {row["class"] for row in rows} == {"chat", "all"}
    assert all(int(row["offered"]) == 21 and int(row["whole"]) == 20 for row in rows)


def test_the_highest_rates_are_compared_with_the_first_arms(several_rates: Path) -> None:
    assert "<td>3.00 to 3.20</td><td>2.53</td>" in (several_rates / "report.html").read_text()
