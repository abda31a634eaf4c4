"""Checks as the exporter sees them, without sockets or clock."""

import pytest

from kvtransfer.endpoint.exporting.exporter import Exporter
from kvtransfer.endpoint.frames import BadFrame
from kvtransfer.messages import MAX_CHECK_BLOCKS, Check, Checksums, Failed
from kvtransfer.verification.check_thread import CheckResult
from tests.unit.kvtransfer.rank_pair import PROMPT_HASH
from tests.unit.kvtransfer.test_exporter import CACHE, an_exporter, attach, told


def a_finished_export(*importers: bytes) -> Exporter:
    exporter = an_exporter(*importers)
    exporter.open(0.0, "t", PROMPT_HASH, 12)
    for importer in importers:
        attach(exporter, importer, "t")
    exporter.finish(0.0, "t", [4, 5, 6], 12, 7)
    told(exporter)
    return exporter


def check(exporter: Exporter, importer: bytes = b"one", *block_ids: int, check_id: int = 1, attempt: int = 0) -> None:
    exporter.receive(1.0, importer, Check("t", attempt, check_id, list(block_ids or (4, 6))))


def answer(exporter: Exporter, reason: str = "") -> None:
    job = exporter.checks.jobs.pop(0)
    exporter.checked(CheckResult(job, [] if reason else [10 * block for block in job.block_ids], reason))


def test_a_check_is_a_job_and_its_result_the_answer() -> None:
    exporter = a_finished_export(b"one")
    check(exporter)
    assert exporter.checks.jobs[0].layers == CACHE.layers
    assert told(exporter) == []
    answer(exporter)
    assert told(exporter) == [Checksums("t", 1, [40, 60])]


def test_importers_with_equal_check_ids_get_their_own_answers() -> None:
    exporter = a_finished_export(b"one", b"two")
    check(exporter, b"one", 4)
    check(exporter, b"two", 5)
    answer(exporter)
    answer(exporter)
    assert exporter.outbox == [(b"one", Checksums("t", 1, [40])), (b"two", Checksums("t", 1, [50]))]


def test_a_failure_to_compute_is_told() -> None:
    exporter = a_finished_export(b"one")
    check(exporter)
    answer(exporter, "no memory")
    assert told(exporter) == [Failed("t", "transport", "no checksums: no memory")]


def test_an_answer_that_nobody_waits_for_is_not_sent() -> None:
    for end in (
        lambda exporter: exporter.drop(2.0, ["t"]),
        lambda exporter: exporter.abort(2.0, "t", "for a test"),
        lambda exporter: exporter.importer_died("one"),
        lambda exporter: exporter.sweep(1000.0),
    ):
        exporter = a_finished_export(b"one")
        check(exporter)
        end(exporter)
        told(exporter)
        answer(exporter)
        assert told(exporter) == []
        assert not exporter.checks._under_way


@pytest.mark.parametrize("block_ids", [(7,), (4, 63), (-1,), (1 << 40,)], ids=str)
def test_a_check_of_other_blocks_is_a_bad_frame(block_ids: tuple[int, ...]) -> None:
    with pytest.raises(BadFrame):
        check(a_finished_export(b"one"), b"one", *block_ids)


def test_checks_that_no_correct_importer_sends_are_bad_frames() -> None:
    exporter = a_finished_export(b"one")
    with pytest.raises(BadFrame, match="0 blocks"):
        exporter.receive(1.0, b"one", Check("t", 0, 1, []))
    with pytest.raises(BadFrame, match="too many"):
        check(exporter, b"one", *[4] * (MAX_CHECK_BLOCKS + 1))
    check(exporter)
    with pytest.raises(BadFrame, match="second check"):
        check(exporter, check_id=2)
    with pytest.raises(BadFrame, match="not welcomed"):
        check(exporter, b"stranger")
    assert len(exporter.checks.jobs) == 1


def test_what_is_still_being_computed_is_not_checked() -> None:
    exporter = an_exporter(b"one")
    exporter.open(0.0, "t", PROMPT_HASH, 12)
    attach(exporter, b"one", "t")
    exporter.announce(0.0, "t", [4, 5, 6], 12)
    with pytest.raises(BadFrame, match="still being computed"):
        check(exporter)


def test_a_check_of_an_earlier_attempt_or_of_nothing_gets_no_answer() -> None:
    exporter = an_exporter(b"one")
    exporter.open(0.0, "t", PROMPT_HASH, 12)
    attach(exporter, b"one", "t")
    exporter.announce(0.0, "t", [4, 5, 6], 12)
    exporter.restart(0.0, "t")
    exporter.finish(0.0, "t", [4, 5, 6], 12, 7)
    check(exporter, attempt=0)
    exporter.receive(1.0, b"one", Check("another", 0, 1, [4]))
    assert exporter.checks.jobs == []
