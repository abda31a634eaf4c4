import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from lab.links.plot import save_plot
from lab.links.report import Fairness, Machine, Report, Series, Skipped, Spread, percentile
from lab.links.shapes import REAL_SHAPES
from lab.links.table import tables

MODEL = REAL_SHAPES[1].model


def series(arm: str, concurrent: int, *seconds: float) -> Series:
    return Series(arm, MODEL, concurrent, 64, 1_000_000_000, list(seconds))


REPORT = Report(
    machine=Machine(2, "a processor", 24 << 30, 0.5),
    versions={"pyzmq": "27.1"},
    shapes=list(REAL_SHAPES),
    series=[
        series("memcpy", 1, 0.1, 0.2, 0.1),
        series("readv", 1, 0.2, 0.4, 0.2),
        series("host", 1, 0.2, 0.5, 0.25),
        series("host", 8, 0.2, 0.4, 0.2),
        series("zmq", 1, 0.5, 1.0, 0.5),
        series("mooncake", 1, 0.6, 2.0, 0.7),
    ],
    skipped=[
        Skipped("nixl", "the package nixl cannot be imported", is_failure=False),
        Skipped("cuda_ipc", "needs a GPU", is_failure=False),
        Skipped("nccl", "needs a GPU", is_failure=False),
        Skipped("tcp", "the sender closed the connection", is_failure=True),
    ],
    fairness=[Fairness("host", MODEL, 4 << 30, 2 << 20, [0.9], [0.001, 0.002, 0.003], [0.01, 0.012, 0.3])],
    seconds=12.5,
)


def found(arm: str, concurrent: int) -> Series:
    one = REPORT.find(arm, MODEL, concurrent)
    assert one is not None
    return one


def test_a_rate_is_the_median_with_the_lowest_and_the_highest_beside_it() -> None:
    assert found("memcpy", 1).gb_per_s == Spread(5.0, 10.0, 10.0)
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)


def test_ratios_are_taken_within_each_round() -> None:
    assert REPORT.ratio(found("host", 1), "readv") == pytest.approx(0.8), "of 1, 0.8 and 0.8"
    assert REPORT.ratio(found("zmq", 1), "mooncake") == pytest.approx(1.4), "of 1.2, 2 and 1.4"
    assert REPORT.ratio(found("memcpy", 1), "") is None
    assert REPORT.ratio(found("zmq", 1), "tcp") is None, "that arm failed"


def test_a_limit_without_concurrency_counts_for_any_number_of_transfers() -> None:
    assert REPORT.ratio(found("host", 8), "readv") == 1.0


def test_percentiles_name_a_value_that_occurred() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert percentile([5.0], 0.95) == 5.0
    assert percentile([float(value) for value in range(100)], 0.95) == 94.0


def test_targets_are_judged_by_the_worst_shape() -> None:
    host, zmq, behind = REPORT.verdicts()
    assert (host.found, host.is_met) == ("0.80 to 1.00 times", False)
    assert (zmq.found, zmq.is_met) == ("1.40 to 1.40 times", False)
    assert "4 GiB over host" in behind.target
    assert behind.found == "10.0 ms longer, 95 % of them at most 298.0 ms"
    assert behind.is_met is False


def test_a_target_without_its_rival_is_not_judged() -> None:
    without = msgspec.structs.replace(REPORT, series=[one for one in REPORT.series if one.arm != "mooncake"])
    assert without.verdicts()[1].is_met is None


def test_a_report_survives_its_file() -> None:
    assert msgspec.json.decode(msgspec.json.encode(REPORT), type=Report) == REPORT


def test_the_tables_fit_80_columns_and_name_what_was_left_out() -> None:
    out = io.StringIO()
    Console(file=out, width=80, highlight=False).print(tables(REPORT))
    text = out.getvalue()
    for expected in (
        "Llama-3.1-8B: 64 blocks of 16 tokens, each 32 x 64 KiB, 1000 MB",
        "process_vm_readv",
        "NIXL (UCX) not measured: the package nixl",
        "cuda_ipc, nccl not measured: needs a GPU",
        "TCP stream failed: the sender",
        "MISSED",
    ):
        assert expected in text, text
    assert "…" not in text
    assert "SmolLM2" not in text, "nothing was measured of it"


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `lab` is not installed")
    save_plot(REPORT, tmp_path / "links.png")
    assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")
