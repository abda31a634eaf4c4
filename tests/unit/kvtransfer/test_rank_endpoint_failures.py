"""Peers that die, hang, restart or talk nonsense, and endpoints that die themselves."""

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from kvtransfer import messages
from kvtransfer.endpoint.importing.importer import Importer
from kvtransfer.rank_endpoint import EndpointDied
from tests.unit.kvtransfer.rank_pair import PROMPT_HASH, Cluster, Rank, eventually

Spawn = Callable[..., tuple[subprocess.Popen[str], str, str]]


def open_import_from(importer: Rank, address: str, epoch: str, wants_first_token: bool) -> None:
    importer.endpoint.open_import("t", address, epoch, PROMPT_HASH, 12, wants_first_token)
    importer.endpoint.place_import("t", 0, [7, 8, 9])


def test_an_exporter_killed_in_mid_transfer_means_recompute(cluster: Cluster, link: str, spawn: Spawn) -> None:
    process, address, epoch = spawn(link, "exporter")
    importer = cluster.rank(links=(link,))
    open_import_from(importer, address, epoch, wants_first_token=True)
    eventually(lambda: importer.endpoint.stats().bytes_in)
    process.kill()
    eventually(lambda: not importer.endpoint.stats().peers)
    assert not importer.has_closed(0.1), "nobody knows the first token yet"
    importer.endpoint.give_first_token("t", 5)
    closed = importer.closed_import(timeout_s=1)
    assert (closed.outcome, closed.failure_kind, closed.first_token) == ("recompute", "peer_lost", 5)
    assert closed.bad_block_ids == [7, 8, 9]
    eventually(lambda: importer.endpoint.stats().failures == {"peer_lost": 1})


def test_a_failed_import_whose_token_never_comes_can_be_cancelled(cluster: Cluster, spawn: Spawn) -> None:
    process, address, epoch = spawn("zmq", "exporter")
    importer = cluster.rank()
    open_import_from(importer, address, epoch, wants_first_token=True)
    process.kill()
    assert not importer.has_closed(0.2)
    importer.endpoint.cancel_import("t")
    assert importer.closed_import(timeout_s=1).outcome == "cancelled"


def test_a_stopped_exporter_counts_as_lost(cluster: Cluster, spawn: Spawn) -> None:
    process, address, epoch = spawn("zmq", "exporter")
    importer = cluster.rank(links=("zmq",))
    open_import_from(importer, address, epoch, wants_first_token=False)
    eventually(lambda: importer.endpoint.stats().bytes_in)
    process.send_signal(signal.SIGSTOP)
    assert importer.closed_import(timeout_s=3).failure_kind == "peer_lost"


def test_an_exporter_that_was_never_there_counts_as_lost(cluster: Cluster, directory: Path) -> None:
    importer = cluster.rank(peer_lost_after_s=0.4)
    open_import_from(importer, f"ipc://{directory}/nobody", "epoch", wants_first_token=False)
    closed = importer.closed_import(timeout_s=2)
    assert (closed.outcome, closed.failure_kind) == ("recompute", "peer_lost")


def test_an_address_that_is_none_fails_one_transfer_only(cluster: Cluster) -> None:
    exporter, importer = cluster.rank(), cluster.rank()
    open_import_from(importer, "carrier-pigeon://coop", "epoch", wants_first_token=False)
    closed = importer.closed_import(timeout_s=2)
    assert (closed.failure_kind, "cannot connect" in closed.reason) == ("peer_lost", True)
    exporter.export("u", [1, 2, 3], 12)
    importer.import_("u", exporter, [7, 8, 9], num_tokens=12)
    assert importer.closed_import("u").outcome == "loaded"


def test_a_restarted_exporter_on_the_same_address_is_a_new_peer(cluster: Cluster, link: str) -> None:
    exporter, importer = cluster.rank(name="same", links=(link,)), cluster.rank(links=(link,))
    exporter.export("before", [1, 2], 8)
    importer.import_("before", exporter, [7, 8], num_tokens=8)
    assert importer.closed_import("before").outcome == "loaded"
    old_epoch = exporter.endpoint.epoch
    exporter.endpoint.close()
    exporter = cluster.rank(name="same", links=(link,))
    exporter.export("after", [1, 2], 8)
    importer.import_("after", exporter, [7, 8], num_tokens=8)
    importer.import_("stale", exporter, [9, 10], num_tokens=8, wants_first_token=False, epoch=old_epoch)
    assert importer.closed_import("after").outcome == "loaded"
    assert importer.holds([7, 8], exporter, [1, 2])
    assert importer.closed_import("stale").failure_kind == "peer_lost"


def test_descriptors_stay_flat_over_restarts_of_a_peer(cluster: Cluster) -> None:
    importer = cluster.rank()

    def restart_and_transfer(number: int) -> None:
        exporter = cluster.rank(name="same")
        exporter.export(f"t{number}", [1], 4)
        importer.import_(f"t{number}", exporter, [7], num_tokens=4)
        assert importer.closed_import(f"t{number}").outcome == "loaded"
        exporter.endpoint.close()
        eventually(lambda: not importer.endpoint.stats().peers)

    def num_descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    restart_and_transfer(0)
    time.sleep(0.1)  # ZMQ closes in its own time
    before = num_descriptors()
    for number in range(1, 8):
        restart_and_transfer(number)
    eventually(lambda: num_descriptors() <= before)


def test_the_death_of_an_importer_ends_its_hold_at_once(cluster: Cluster, spawn: Spawn) -> None:
    exporter = cluster.rank(links=("host",), lease_first_s=30, lease_renew_s=20)
    exporter.endpoint.open_export("t", PROMPT_HASH, 12)
    process, _, _ = spawn("host", "importer", exporter.endpoint.address, exporter.endpoint.epoch)
    exporter.endpoint.finish_export("t", [1, 2, 3], 12, 7)
    exports = exporter.endpoint._loop.exporter._exports
    eventually(lambda: exports["t"].lease.importers)
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    exporter.endpoint.abort_export("t", "for a test")
    assert not exporter.has_closed(0.2), "it might be reading"
    process.kill()
    assert exporter.closed_export(timeout_s=1).outcome == "aborted"


def test_a_dead_importer_keeps_the_blocks_no_longer_than_its_lease(cluster: Cluster, link: str, spawn: Spawn) -> None:
    exporter = cluster.rank(links=(link,), lease_first_s=0.5, lease_renew_s=0.5, beat_s=0.2)
    exporter.endpoint.open_export("t", PROMPT_HASH, 12)
    process, _, _ = spawn(link, "importer", exporter.endpoint.address, exporter.endpoint.epoch)
    exporter.endpoint.finish_export("t", [1, 2, 3], 12, 7)
    process.kill()
    assert exporter.closed_export(timeout_s=2).outcome == "expired"


class FakeExporter:
    """Speaks the protocol by hand."""

    def __init__(self, directory: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.address = f"ipc://{directory}/fake"
        self.socket.bind(self.address)
        self.importer = b""

    def hear(self, kind: type[msgspec.Struct], timeout_s: float = 3.0) -> msgspec.Struct:
        """The next message of that kind."""
        until_s = time.monotonic() + timeout_s
        while self.socket.poll(max(0, int((until_s - time.monotonic()) * 1000))):
            self.importer, frame = self.socket.recv_multipart()
            message = msgspec.msgpack.decode(frame, type=messages.FromImporter)
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} came")

    def say(self, *parts: messages.FromExporter | bytes) -> None:
        frames = [part if isinstance(part, bytes) else msgspec.msgpack.encode(part) for part in parts]
        self.socket.send_multipart([self.importer, *frames])

    def serve(self, importer: Rank) -> messages.Fetch:
        """Everything up to the first fetch of transfer `t`."""
        open_import_from(importer, self.address, "fake", wants_first_token=False)
        self.hear(messages.Hello)
        self.say(messages.Welcome("fake", 0, "zmq", "for a test", 0, []))
        self.hear(messages.Attach)
        self.say(messages.Attached("t", 0.0))
        self.say(messages.Ready("t", 0, 0, [1, 2, 3], 12))
        self.say(messages.Done("t", 0, 12, PROMPT_HASH, 7))
        fetch = self.hear(messages.Fetch)
        assert isinstance(fetch, messages.Fetch)
        return fetch


@pytest.fixture
def fake_exporter(directory: Path) -> Iterator[FakeExporter]:
    exporter = FakeExporter(directory)
    yield exporter
    exporter.context.destroy(linger=0)


NONSENSE = [
    [b""],
    [b"\xc1" * 100],
    [msgspec.msgpack.encode({"type": "hello"})],
    [msgspec.msgpack.encode({"type": "no such message"})],
    [msgspec.msgpack.encode(messages.Release("t"))[:-2]],
    [b"\x91" * 100_000],
    [b"one", b"two", b"three"],
    [b"x" * (5 << 20)],
]


def test_nonsense_from_an_exporter_is_dropped_and_counted(cluster: Cluster, fake_exporter: FakeExporter) -> None:
    importer = cluster.rank(stalled_after_s=30)
    fetch = fake_exporter.serve(importer)
    header = messages.Blocks("t", fetch.fetch_id, 5)
    nonsense = [*NONSENSE, [msgspec.msgpack.encode(header)], [msgspec.msgpack.encode(header), b"short"]]
    for frames in nonsense:
        fake_exporter.say(*frames)
    eventually(lambda: importer.endpoint.stats().bad_frames == len(nonsense))
    assert importer.endpoint.stats().imports_open == 1
    importer.endpoint.check()


def test_a_fetch_without_an_answer_fails_the_transfer(cluster: Cluster, fake_exporter: FakeExporter) -> None:
    importer = cluster.rank(stalled_after_s=0.3)
    fake_exporter.serve(importer)
    closed = importer.closed_import(timeout_s=2)
    assert (closed.outcome, closed.failure_kind, closed.bad_block_ids) == ("recompute", "transport", [7, 8, 9])
    assert fake_exporter.hear(messages.Release) == messages.Release("t")


def test_an_exporter_that_stops_answering_beats_is_lost(cluster: Cluster, fake_exporter: FakeExporter) -> None:
    importer = cluster.rank(stalled_after_s=30, beat_s=0.1, peer_lost_after_s=0.5)
    fake_exporter.serve(importer)
    fake_exporter.hear(messages.Beat)
    assert importer.closed_import(timeout_s=2).failure_kind == "peer_lost"


def test_a_lease_that_the_exporter_no_longer_knows_fails_the_transfer(
    cluster: Cluster, fake_exporter: FakeExporter
) -> None:
    importer = cluster.rank(stalled_after_s=30, beat_s=0.1)
    fake_exporter.serve(importer)
    fake_exporter.hear(messages.Beat)
    fake_exporter.say(messages.BeatAck(0.0, [], ["t"]))
    assert importer.closed_import(timeout_s=2).failure_kind == "unknown_transfer"


def test_late_blocks_of_a_cancelled_transfer_are_not_written(cluster: Cluster, fake_exporter: FakeExporter) -> None:
    importer = cluster.rank(chunk_bytes=1 << 20, stalled_after_s=30)
    before = {layer: cache.copy() for layer, cache in importer.cache.items()}
    fetch = fake_exporter.serve(importer)
    importer.endpoint.cancel_import("t")
    assert importer.closed_import().outcome == "cancelled"
    num_bytes = 3 * importer.map.layout.block_bytes
    fake_exporter.say(messages.Blocks("t", fetch.fetch_id, num_bytes), b"\xff" * num_bytes)
    time.sleep(0.1)
    assert all((importer.cache[layer] == before[layer]).all() for layer in before)
    assert importer.endpoint.stats().bad_frames == 0


def test_nonsense_from_an_importer_is_dropped_and_counted(cluster: Cluster) -> None:
    exporter, importer = cluster.rank(), cluster.rank()
    unwelcome = [msgspec.msgpack.encode(messages.Release("t"))]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(exporter.endpoint.address)
        for frames in [*NONSENSE, unwelcome]:
            socket.send_multipart(frames)
        eventually(lambda: exporter.endpoint.stats().bad_frames == len(NONSENSE) + 1)
        socket.send(b"x" * (20 << 20))  # ZMQ itself cuts this one off
    exporter.export("t", [1, 2, 3], 12)
    importer.import_("t", exporter, [7, 8, 9], num_tokens=12)
    assert importer.closed_import().outcome == "loaded"


def test_the_death_of_the_thread_is_noticed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    importer = cluster.rank()
    importer.endpoint.check()

    def broken(self: Importer, now_s: float) -> None:
        raise RuntimeError("for a test")

    monkeypatch.setattr(Importer, "pump", broken)
    importer.endpoint.give_first_token("t", 1)  # wakes it
    with pytest.raises(EndpointDied, match="for a test"):
        importer.endpoint.wait(5)
    with pytest.raises(EndpointDied, match="Restart this worker"):
        importer.endpoint.check()


def test_the_death_of_the_copy_thread_is_noticed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(pid: int, plan: object) -> None:
        raise RuntimeError("for a test")

    monkeypatch.setattr("kvtransfer.endpoint.copy_threads.read_memory", broken)
    exporter, importer = cluster.rank(), cluster.rank()
    exporter.export("t", [1], 4)
    importer.import_("t", exporter, [7], num_tokens=4)
    with pytest.raises(EndpointDied, match="copy thread"):
        importer.endpoint.wait(5)
    exporter.endpoint.close(timeout_s=0)  # the importer cannot release any more


def test_closing_ends_every_transfer(cluster: Cluster, link: str) -> None:
    exporter, importer = cluster.rank(links=(link,)), cluster.rank(links=(link,))
    exporter.endpoint.open_export("t", PROMPT_HASH, 12)
    importer.import_("t", exporter, [7, 8, 9], num_tokens=12)
    importer.attach("u", exporter, num_tokens=12)
    started_s = time.monotonic()
    importer.endpoint.close()
    exporter.endpoint.close()
    assert time.monotonic() - started_s < 1
    closed = {closing.transfer_id: closing.outcome for closing in importer.endpoint.take_closed_imports()}
    assert closed == {"t": "cancelled", "u": "cancelled"}
    assert [closing.outcome for closing in exporter.endpoint.take_closed_exports()] == ["aborted"]


def test_an_idle_endpoint_does_not_spin(cluster: Cluster) -> None:
    exporter, importer = cluster.rank(), cluster.rank()
    exporter.endpoint.open_export("t", PROMPT_HASH, 12)
    importer.attach("t", exporter, num_tokens=12)  # queued: leases and beats go on
    time.sleep(0.2)
    before_s = time.process_time()
    time.sleep(0.7)
    assert time.process_time() - before_s < 0.03


def test_an_address_in_use_is_named(cluster: Cluster, directory: Path) -> None:
    (directory / "occupied-3").mkdir()
    with pytest.raises(OSError, match=f"rank 3 cannot bind its exporter to ipc://{directory}/occupied-3"):
        cluster.rank(name="occupied", rank=3)
