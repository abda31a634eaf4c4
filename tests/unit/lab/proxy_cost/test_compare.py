"""What becomes of samples: ratios within rounds, medians over them."""

import pytest

from lab.proxy_cost.compare import compare, quantile
from lab.proxy_cost.table import table
from lab.proxy_cost.work import Answer, Cell, Sample

CELL = Cell(2, 10, 2)


def sample(wall_s: float, cpu_s: float, behind_cpu_s: float = 0.0, events: int = 10) -> Sample:
    answers = tuple(Answer(ttft_s, 10, events, 128) for ttft_s in (0.1, 0.3))
    return Sample(wall_s, answers, cpu_s, behind_cpu_s)


def test_a_slow_round_that_hits_both_arms_changes_no_ratio() -> None:
    samples = {
        ("a", CELL.name): [sample(1.0, 0.2), sample(10.0, 2.0), sample(1.0, 0.2)],
        ("b", CELL.name): [sample(2.0, 0.3), sample(20.0, 3.0), sample(2.0, 0.3)],
    }
    a, b = compare(samples, [CELL], ["a", "b"], base="a")
    assert (a.speed, a.cpu) == (1.0, 1.0)
    assert b.speed == pytest.approx(0.5)
    assert b.cpu == pytest.approx(1.5)
    assert b.tokens_per_s == pytest.approx(10.0)
    assert b.cpu_ms_per_request == pytest.approx(150.0)
    assert b.rounds == 3


def test_what_stands_behind_is_shown_apart_and_counts_in_the_ratio() -> None:
    samples = {("a", CELL.name): [sample(1.0, 0.2)], ("routed", CELL.name): [sample(1.0, 0.1, behind_cpu_s=0.3)]}
    _, routed = compare(samples, [CELL], ["a", "routed"], base="a")
    assert routed.cpu_ms_per_request == pytest.approx(50.0)
    assert routed.behind_cpu_ms_per_request == pytest.approx(150.0)
    assert routed.cpu == pytest.approx(2.0)


def test_tokens_that_came_together_are_seen() -> None:
    (row,) = compare({("a", CELL.name): [sample(1.0, 0.2, events=4)]}, [CELL], ["a"], base="a")
    assert row.tokens_per_event == pytest.approx(2.5)


def test_quantiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [quantile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert quantile([7.0], 0.99) == 7.0


def test_the_table_has_a_line_for_each_arm() -> None:
    rows = compare({("a", CELL.name): [sample(1.0, 0.2)]}, [CELL], ["a"], base="a")
    assert table(rows, "a").row_count == 1
