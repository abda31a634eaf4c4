import math
import random

import pytest

from lab.experiments.goodput import GoodputSearch, wilson


def found(
    search: GoodputSearch, breaks_at: float, offered: int = 400, seed: int = 1
) -> tuple[int, tuple[float, float]]:
    """Runs it against a server whose share of good requests falls from 100 % to 80 % around `breaks_at`."""
    rng = random.Random(seed)
    num_runs = 0
    while (run := search.next_run()) is not None:
        rate, _ = run
        share = 0.9 + 0.1 * math.tanh(8 * (breaks_at - rate))
        search.note(rate, sum(rng.random() < share for _ in range(offered)), offered)
        num_runs += 1
        assert num_runs < 100
    return num_runs, search.bounds


@pytest.mark.parametrize("breaks_at", [0.4, 1.0, 1.7, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_rate_is_found_between_its_bounds(breaks_at: float, seed: int) -> None:
    search = GoodputSearch(0.25, 4, steps=5, seeds=4)
    num_runs, (low, high) = found(search, breaks_at, offered=3000, seed=seed)
    assert low * 0.95 <= breaks_at <= high * 1.05
    assert high / low == pytest.approx(16 ** (1 / 2**5))
    assert 7 <= num_runs <= 28


def test_ends_that_do_not_bracket_it_are_said() -> None:
    assert found(GoodputSearch(1, 4), breaks_at=0.2)[1] == (0.0, 1)
    assert found(GoodputSearch(1, 4), breaks_at=9)[1] == (4, math.inf)


def test_a_clear_result_needs_one_seed_and_an_open_one_all() -> None:
    search = GoodputSearch(1, 4, seeds=3)
    search.note(1, 100, 100)
    assert search.next_run() == (4, 0)
    search.note(4, 90, 100)
    assert search.next_run() == (4, 1)
    search.note(4, 89, 100)
    assert search.next_run() == (4, 2)
    search.note(4, 88, 100)
    assert search.next_run() == (2.0, 0)


def test_bounds_are_wilsons() -> None:
    low, high = wilson(90, 100, z=1.96)
    assert (low, high) == (pytest.approx(0.8256, abs=1e-3), pytest.approx(0.9448, abs=1e-3))
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(10, 10)[1] == 1.0
