import pytest

from lab.load.client import Record
from lab.load_check.check import check, compare


def test_streams_of_known_timing_are_measured_whole() -> None:
    found = check(num_streams=6, tokens_per_s=50, seconds=0.4)
    assert (found.num_streams, found.num_failed) == (6, 0)
    assert found.most_at_once >= 3
    for row in found.rows:
        # The server waits at least so long. It looks at the clock after it has sent, perhaps after the client.
        assert row.ttft_sent_s >= 0.019
        assert row.ttft_s >= 0.019


def test_what_the_generator_adds_is_the_most_below_p99() -> None:
    sent = [[0.05, 0.10, 0.15, 0.20]] * 200
    records = [Record("s", i, 0, 1, 4, 0.0, 0.0, 0.052, [0.05, 0.05, 0.05], 0.2, 4, 200) for i in range(200)]
    assert compare(records, sent, 0.5).added_s == pytest.approx(0.002)
    for record in records[:3]:
        record.gaps_s = [0.05, 0.5, 0.05]
    assert compare(records, sent, 0.5).added_s == pytest.approx(0.002)
    for record in records[:30]:
        record.gaps_s = [0.05, 0.08, 0.05]
    assert compare(records, sent, 0.5).added_s == pytest.approx(0.03)
    records[-1].error = "cut off"
    found = compare(records, sent, 0.5)
    assert (found.num_failed, found.most_at_once) == (1, 199)
