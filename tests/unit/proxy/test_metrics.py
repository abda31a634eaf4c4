"""What `/metrics` says of transfers."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Gauge

from cluster.messages import HandoverClosed, WorkerLoad
from proxy.metrics import ProxyMetrics

LOAD = WorkerLoad("decode-0", "epoch", 0, 0, 100, 90, 10, 0, 0, 0, {}, {}, {}, 0, {})
LOADED = HandoverClosed("t", "loaded", "", "host", 5_000, 12, 0.2, 0.002, 0.001, 3_000)


class Metrics(ProxyMetrics):
    def __init__(self) -> None:
        self.all = CollectorRegistry()
        super().__init__(self.all)

    def value(self, name: str, **labels: str) -> float | None:
        return self.all.get_sample_value(f"twinpool_{name}", labels)

    def rate(self, link: str, direction: str, worker: str = "decode-0") -> float | None:
        return self.value("worker_gigabytes_per_second", worker=worker, link=link, direction=direction)

    def report(self, **changes: Any) -> None:
        load = msgspec.structs.replace(LOAD, **changes)
        self.observe_load(load.worker_id, load)


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    made = Metrics()
    yield made
    made.unregister()
    assert not list(made.all.collect()), "one that stays would collide with the next proxy's"


def test_every_metric_of_time_or_size_tells_its_unit(metrics: Metrics) -> None:
    units = {"seconds": "econds", "bytes": "bytes", "tokens": "tokens", "blocks": "blocks"}
    for family in metrics.all.collect():
        assert family.documentation.endswith("."), family.name
        for unit in (units[word] for word in family.name.split("_") if word in units):
            assert unit in family.documentation.replace("Bytes", "bytes"), family.name


def test_every_gauge_shows_one_value_where_several_api_servers_show_it(metrics: Metrics) -> None:
    gauges = [metric for metric in metrics.all._collector_to_names if isinstance(metric, Gauge)]
    assert len(gauges) > 10
    assert {gauge._multiprocess_mode for gauge in gauges} == {"mostrecent"}, "others are shown per process"


def test_what_was_left_to_copy_is_told_of_handovers_that_were_loaded(metrics: Metrics) -> None:
    metrics.observe_handover(LOADED)
    metrics.observe_handover(msgspec.structs.replace(LOADED, bytes_left_at_done=0))
    metrics.observe_handover(msgspec.structs.replace(LOADED, outcome="recompute", failure_kind="checksum"))
    assert metrics.value("handover_bytes_left_count") == 2
    assert metrics.value("handover_bytes_left_sum") == 3_000
    assert metrics.value("handover_bytes_left_bucket", le="0.0") == 1
    assert metrics.value("handover_failures_total", kind="checksum") == 1


def test_rates_are_those_of_the_latest_copies_in_both_directions(metrics: Metrics) -> None:
    metrics.report(bytes_in={"zmq": 4_000_000_000}, copy_s={"zmq": 2.0}, bytes_out={"host": 10}, copy_out_s={"host": 1})
    assert metrics.rate("zmq", "in") == 2.0
    assert metrics.rate("host", "out") == 1e-8
    metrics.report(bytes_in={"zmq": 5_000_000_000}, copy_s={"zmq": 2.1})
    assert metrics.rate("zmq", "in") == pytest.approx(10)
    metrics.report(bytes_in={"zmq": 5_000_000_000}, copy_s={"zmq": 2.1})
    assert metrics.rate("zmq", "in") == pytest.approx(10), "nothing moved since"
    assert metrics.value("worker_bytes_in", worker="decode-0", link="zmq") == 5e9
    assert metrics.value("worker_copy_out_seconds", worker="decode-0", link="host") == 1


def test_messages_are_counted_beside_their_bytes(metrics: Metrics) -> None:
    metrics.report(bytes_in={"zmq": 8_000_000, "host": 5}, copies_in={"zmq": 2, "host": 1})
    assert metrics.value("worker_copies_in", worker="decode-0", link="zmq") == 2
    assert metrics.value("worker_copies_in", worker="decode-0", link="host") == 1


def test_a_worker_that_gets_nowhere_is_seen_before_health_fails(metrics: Metrics) -> None:
    metrics.observe_pace({"prefill-0": 0.0, "decode-0": 12.5}, 700)
    assert metrics.value("worker_without_progress_seconds", worker="decode-0") == 12.5
    assert metrics.value("worker_without_progress_seconds", worker="prefill-0") == 0.0
    assert metrics.value("expected_output_tokens") == 700
    metrics.observe_pace({"prefill-0": 0.0}, 700)
    assert metrics.value("worker_without_progress_seconds", worker="decode-0") == 0.0, "it is gone, not stuck"
    metrics.forget_worker("decode-0")
    metrics.observe_pace({}, 700)
    assert metrics.value("worker_without_progress_seconds", worker="decode-0") is None


def test_a_restarted_worker_counts_from_zero(metrics: Metrics) -> None:
    metrics.report(bytes_in={"host": 9_000_000_000}, copy_s={"host": 9.0})
    metrics.report(bytes_in={"host": 1_000_000_000}, copy_s={"host": 0.5})
    assert metrics.rate("host", "in") == 2.0
    assert metrics.value("worker_bytes_in", worker="decode-0", link="host") == 1e9


def test_leases_are_shown_by_state(metrics: Metrics) -> None:
    metrics.report(worker_id="prefill-0", leases={"computing": 3, "held": 2})
    assert metrics.value("leases", worker="prefill-0", state="computing") == 3
    metrics.report(worker_id="prefill-0", leases={"computing": 0, "held": 4})
    assert metrics.value("leases", worker="prefill-0", state="computing") == 0
    assert metrics.value("leases", worker="prefill-0", state="held") == 4


def test_the_age_of_a_queue_is_that_of_its_longest_waiter(metrics: Metrics) -> None:
    metrics.observe_stages([("waiting", 0.5), ("waiting", 7.0), ("decoding", 99.0), ("prefilling", 2.0)])
    ages = {
        stage: metrics.value("queue_age_seconds", stage=stage) for stage in ("waiting", "prefilling", "handing_over")
    }
    assert ages == {"waiting": 7.0, "prefilling": 2.0, "handing_over": 0.0}
    assert metrics.value("requests_open", stage="waiting") == 2
    assert metrics.value("queue_age_seconds", stage="decoding") is None, "a long stream is no queue"
    metrics.observe_stages([])
    assert metrics.value("queue_age_seconds", stage="waiting") == 0.0


def test_failures_are_shown_by_kind(metrics: Metrics) -> None:
    metrics.report(transfer_failures={"lease_expired": 2, "checksum": 1})
    assert metrics.value("transfer_failures", worker="decode-0", kind="lease_expired") == 2
    assert metrics.value("transfer_failures", worker="decode-0", kind="checksum") == 1


@pytest.mark.parametrize("several_api_servers", [False, True])
def test_nothing_is_shown_of_a_worker_that_was_removed(
    several_api_servers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = CollectorRegistry()
    metrics = ProxyMetrics(registry)
    for worker_id in ("decode-0", "decode-1"):
        metrics.worker_requests.labels(worker_id, "running").set(3)
        metrics.worker_restarts.labels(worker_id).inc()
    if several_api_servers:
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/nowhere")
    metrics.forget_worker("decode-1")
    shown = {"worker": "decode-1", "state": "running"}
    left = registry.get_sample_value("twinpool_worker_requests", shown)
    assert left == (0 if several_api_servers else None)
    assert registry.get_sample_value("twinpool_worker_requests", {**shown, "worker": "decode-0"}) == 3
    assert registry.get_sample_value("twinpool_worker_restarts_total", {"worker": "decode-0"}) == 1
