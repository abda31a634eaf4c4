"""A worker that has work and gets nowhere is told from one that is idle, busy with a long prompt, or unheard."""

from dataclasses import dataclass

import msgspec
import pytest

from cluster.messages import WorkerLoad
from proxy.health.progress import LATE_BEAT_S, Progress, Stall
from proxy.health.verdict import cluster_faults

LOAD = WorkerLoad("decode-0", "epoch", 1, 0, 100, 90, 10, 0, 0, 0, {}, {}, {}, 0, {})


@dataclass
class Reporter:
    load: WorkerLoad | None = LOAD
    worker_id: str = "decode-0"


def after_beats(progress: Progress, reporter: Reporter, *, at_work: bool = True, beats: int = 70) -> list[Stall]:
    """What has stalled for over a minute when `beats` seconds have passed."""
    start_s = progress._beat_s or 0.0
    for beat in range(beats + 1):
        progress.beat([reporter], {"decode-0"} if at_work else (), start_s + beat)
    return progress.stalled(60)


def test_a_worker_with_work_and_no_progress_has_stalled() -> None:
    progress = Progress()
    assert after_beats(progress, Reporter(), beats=60) == []
    assert after_beats(progress, Reporter(), beats=10) == [Stall("decode-0", 70.0)]
    assert after_beats(progress, Reporter(load=None)) == [Stall("decode-0", 70.0)], "one that never reported"


def test_the_time_without_progress_is_told_before_it_is_a_stall() -> None:
    progress = Progress()
    assert progress.without_progress_s() == {}
    after_beats(progress, Reporter(), beats=20)
    assert progress.without_progress_s() == {"decode-0": 20.0}
    after_beats(progress, Reporter(), at_work=False, beats=5)
    assert progress.without_progress_s() == {"decode-0": 0.0}


def test_an_idle_worker_is_healthy_and_its_idleness_does_not_count_later() -> None:
    progress = Progress()
    assert after_beats(progress, Reporter(), at_work=False, beats=1000) == []
    assert after_beats(progress, Reporter(), beats=59) == []


@pytest.mark.parametrize("changes", [{"tokens_computed": 512}, {"bytes_in": {"host": 9}}, {"epoch": "another"}])
def test_chunks_and_blocks_without_an_output_are_progress(changes: dict[str, object]) -> None:
    progress, reporter = Progress(), Reporter()
    after_beats(progress, reporter, beats=50)
    reporter.load = msgspec.structs.replace(LOAD, **changes)
    assert after_beats(progress, reporter, beats=50) == []


def test_more_requests_in_the_queue_are_no_progress() -> None:
    progress, reporter = Progress(), Reporter()
    after_beats(progress, reporter, beats=50)
    reporter.load = msgspec.structs.replace(LOAD, num_waiting=7, num_running=3)
    assert after_beats(progress, reporter, beats=50) != []


def test_an_output_between_reports_is_progress() -> None:
    progress = Progress()
    after_beats(progress, Reporter(), beats=50)
    progress.worked("decode-0", 50.5)
    progress.worked("a stranger", 50.5)
    assert after_beats(progress, Reporter(), beats=50) == []


def test_a_worker_that_is_gone_has_not_stalled() -> None:
    progress = Progress()
    after_beats(progress, Reporter())
    progress.beat([], {"decode-0"}, 71.0)
    assert progress.stalled(60) == []


def test_the_proxys_own_pause_is_nobodys_stall() -> None:
    progress = Progress()
    progress.beat([Reporter()], {"decode-0"}, 0.0)
    progress.beat([Reporter()], {"decode-0"}, 300.0)
    assert progress.stalled(60) == []
    progress.beat([Reporter()], {"decode-0"}, 300.0 + LATE_BEAT_S)
    assert progress.stalled(LATE_BEAT_S - 1) == [Stall("decode-0", LATE_BEAT_S)]


def test_before_the_first_beat_nothing_has_stalled() -> None:
    assert Progress().stalled(0) == []


def test_what_is_wrong_is_a_sentence_that_names_worker_and_setting() -> None:
    assert cluster_faults(1, [], 60) == []
    nobody, stalled = cluster_faults(0, [Stall("prefill-1", 61.4)], 60)
    assert nobody == "no decode worker is alive, so nobody generates tokens"
    assert stalled.startswith("worker prefill-1 has requests and no token or chunk came from it for 61 s")
    assert "liveness.stalled_after_s=60" in stalled
