"""Endpoints over real sockets that compare checksums: what is found, what it costs in blocks, what is left alone."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvtransfer.endpoint.importing.importer import Importer
from kvtransfer.gpu.device import CudaUnusable
from kvtransfer.layout import Region
from kvtransfer.links.zmq_frames import HostMemory
from kvtransfer.messages import FAILURE_KINDS
from kvtransfer.resharding.forms import CPU_PLANES
from kvtransfer.transfers.imports import ClosedImport, Import, Piece
from kvtransfer.verification import check_thread
from kvtransfer.verification.block_checks import sampled
from kvtransfer.verification.exporter_side import ExportChecks
from tests.unit.kvtransfer.gpu_pair import GpuCluster
from tests.unit.kvtransfer.rank_pair import BLOCK_SIZE, Cluster, Rank, eventually
from tests.unit.kvtransfer.resharding.sharded_cache import Model
from tests.unit.kvtransfer.test_rank_endpoint_resharding import Worker, Workers, hand_over

THEIRS = list(range(1, 25))
OURS = list(range(60, 36, -1))
NUM_TOKENS = len(THEIRS) * BLOCK_SIZE - 1
NOT_SAMPLED = next(index for index in range(24) if index not in sampled("t", 24))


def verifying(cluster: Cluster, link: str, verify: str, **changes: object) -> tuple[Rank, Rank]:
    """An exporter, which need not verify to answer, and an importer."""
    return cluster.rank(links=(link,), **changes), cluster.rank(links=(link,), verify=verify, **changes)


def after_each_copy(monkeypatch: pytest.MonkeyPatch, call: Callable[[Piece], None]) -> None:
    """Called when the piece has been written into the importer's blocks, and before that is looked at."""
    ended = Importer._ended

    def then(self: Importer, reader: Import, piece: Piece, *args: object, **kwargs: object) -> None:
        call(piece)
        ended(self, reader, piece, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Importer, "_ended", then)


def flip(importer: Rank, *block_ids: int) -> Callable[[Piece], None]:
    """One bit of each of these blocks, in one layer, when it has come."""

    def flipped(piece: Piece) -> None:
        for block in set(block_ids) & set(piece.target_ids):
            if piece.first_layer <= 1 < piece.first_layer + piece.num_layers:
                importer.cache["layers.1.attention"][block, 1, 0, 3] ^= 4

    return flipped


def transfer(exporter: Rank, importer: Rank, transfer_id: str = "t") -> ClosedImport:
    importer.import_(transfer_id, exporter, OURS, NUM_TOKENS)
    exporter.export(transfer_id, THEIRS, NUM_TOKENS)
    return importer.closed_import(transfer_id)


@pytest.mark.parametrize("verify", ["off", "sample", "all"])
def test_true_copies_are_loaded(cluster: Cluster, link: str, verify: str) -> None:
    exporter, importer = verifying(cluster, link, verify)
    closed = transfer(exporter, importer)
    assert (closed.outcome, closed.link, closed.failure_kind, closed.bad_block_ids) == ("loaded", link, "", [])
    assert importer.holds(OURS, exporter, THEIRS)
    assert exporter.closed_export().outcome == "released"
    assert importer.endpoint.stats().bad_frames == exporter.endpoint.stats().bad_frames == 0


def test_a_flipped_bit_is_found_and_all_from_that_block_on_is_computed_again(
    cluster: Cluster, link: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exporter, importer = verifying(cluster, link, "all")
    after_each_copy(monkeypatch, flip(importer, OURS[NOT_SAMPLED], OURS[20]))
    closed = transfer(exporter, importer)
    assert (closed.outcome, closed.failure_kind) == ("recompute", "checksum")
    assert closed.bad_block_ids == OURS[NOT_SAMPLED:]
    assert f"block {NOT_SAMPLED} of the prompt" in closed.reason
    assert closed.first_token == 7, "the token is right, whatever became of the blocks"
    assert exporter.closed_export().outcome == "released"
    assert importer.holds(OURS[:NOT_SAMPLED], exporter, THEIRS[:NOT_SAMPLED])
    eventually(lambda: importer.endpoint.stats().failures == {"checksum": 1})
    assert "checksum" in FAILURE_KINDS
    for index in (NOT_SAMPLED, 20):
        words = f"exporter_block={THEIRS[index]} importer_block={OURS[index]} "
        assert any("checksum_differs transfer=t" in line and words in line for line in caplog.messages)


def test_with_off_nobody_looks(cluster: Cluster, link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, importer = verifying(cluster, link, "off")
    after_each_copy(monkeypatch, flip(importer, OURS[3]))
    threads = threading.active_count()
    assert transfer(exporter, importer).outcome == "loaded"
    assert not importer.holds(OURS, exporter, THEIRS)
    assert threading.active_count() == threads, "no checksum was computed"


@pytest.mark.parametrize("index", range(24))
def test_a_sample_finds_what_is_in_it_and_then_looks_at_all_before(
    cluster: Cluster, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, importer = verifying(cluster, "zmq", "sample", chunk_bytes=1 << 16)
    after_each_copy(monkeypatch, flip(importer, OURS[index], OURS[23]))
    closed = transfer(exporter, importer)
    assert closed.failure_kind == "checksum", "the last block is always looked at"
    assert closed.bad_block_ids == OURS[index:]


def test_a_sample_misses_what_is_not_in_it(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, importer = verifying(cluster, "zmq", "sample")
    after_each_copy(monkeypatch, flip(importer, OURS[NOT_SAMPLED]))
    assert transfer(exporter, importer).outcome == "loaded"


def test_a_bad_copy_does_not_taint_the_next_transfer(
    cluster: Cluster, link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, importer = verifying(cluster, link, "all")
    with monkeypatch.context() as while_bad:
        after_each_copy(while_bad, flip(importer, OURS[0]))
        assert transfer(exporter, importer).bad_block_ids == OURS
    assert transfer(exporter, importer, "next").outcome == "loaded"


def test_only_copied_blocks_are_compared(cluster: Cluster, link: str) -> None:
    exporter, importer = verifying(cluster, link, "all")
    importer.import_("t", exporter, OURS[20:], NUM_TOKENS, first_block=20)
    exporter.export("t", THEIRS, NUM_TOKENS)
    assert importer.closed_import().outcome == "loaded"
    importer.import_("u", exporter, [], NUM_TOKENS, first_block=24)
    exporter.export("u", THEIRS, NUM_TOKENS)
    assert (importer.closed_import("u").outcome, importer.closed_import("u").bytes_moved) == ("loaded", 0)


def test_many_transfers_are_verified_in_turns(cluster: Cluster, link: str) -> None:
    exporter, importer = verifying(cluster, link, "all")
    chance = random.Random(1)
    places = {f"t{n}": chance.sample(range(64), 4) for n in range(16)}
    for n, (name, blocks) in enumerate(places.items()):
        importer.import_(name, exporter, [4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3], 16)
        exporter.export(name, blocks, 16)
    assert {importer.closed_import(name).outcome for name in places} == {"loaded"}
    for n, blocks in enumerate(places.values()):
        assert importer.holds([4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3], exporter, blocks)


class Gate(HostMemory):
    """Holds checksums up."""

    is_addressable = False
    arrived, open = threading.Event(), threading.Event()

    def gather(self, block_ids: Sequence[int], regions: Sequence[Region]) -> memoryview:
        self.arrived.set()
        assert self.open.wait(5)
        return super().gather(block_ids, regions)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Gate]]:
    Gate.arrived, Gate.open = threading.Event(), threading.Event()
    checksums = check_thread.checksums
    held = Gate()
    monkeypatch.setattr(check_thread, "checksums", lambda memory, *rest: checksums(held, *rest))
    yield Gate
    Gate.open.set()


def test_the_blocks_are_held_until_they_are_compared(cluster: Cluster, link: str, gate: type[Gate]) -> None:
    exporter, importer = verifying(cluster, link, "all", lease_first_s=0.2, lease_renew_s=0.35, beat_s=0.1)
    importer.import_("t", exporter, OURS, NUM_TOKENS)
    exporter.export("t", THEIRS, NUM_TOKENS)
    assert gate.arrived.wait(5)
    assert not exporter.has_closed(0.5), "the importer still renews"
    assert not importer.has_closed(0.0)
    gate.open.set()
    assert importer.closed_import().outcome == "loaded"
    assert exporter.closed_export().outcome == "released"


def test_a_cancelled_import_does_not_wait_for_checksums(cluster: Cluster, link: str, gate: type[Gate]) -> None:
    exporter, importer = verifying(cluster, link, "all")
    importer.import_("t", exporter, OURS, NUM_TOKENS)
    exporter.export("t", THEIRS, NUM_TOKENS)
    assert gate.arrived.wait(5)
    importer.endpoint.cancel_import("t")
    assert importer.closed_import().outcome == "cancelled"
    assert exporter.closed_export().outcome == "released"
    gate.open.set()
    assert transfer(exporter, importer, "next").outcome == "loaded"


def test_an_export_that_is_called_off_gives_no_checksums(cluster: Cluster, link: str, gate: type[Gate]) -> None:
    exporter, importer = verifying(cluster, link, "all")
    importer.import_("t", exporter, OURS, NUM_TOKENS)
    exporter.export("t", THEIRS, NUM_TOKENS)
    assert gate.arrived.wait(5)
    exporter.endpoint.abort_export("t", "for a test")
    closed = importer.closed_import()
    assert (closed.outcome, closed.failure_kind, closed.bad_block_ids) == ("recompute", "aborted", OURS)
    gate.open.set()
    assert transfer(exporter, importer, "next").outcome == "loaded"


def test_an_exporter_that_does_not_answer_a_check_is_not_waited_for(
    cluster: Cluster, link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExportChecks, "asked", lambda *_: None)
    exporter, importer = verifying(cluster, link, "all", stalled_after_s=0.2)
    closed = transfer(exporter, importer)
    assert (closed.outcome, closed.failure_kind) == ("recompute", "transport")
    assert closed.reason == "a check had no answer for 0.2 s"
    assert exporter.closed_export().outcome == "released"


MODEL = Model(total_heads=4, head_size=8, num_layers=2)


@pytest.fixture
def workers(cluster: Cluster, link: str) -> Iterator[Workers]:
    workers = Workers(cluster, link)
    yield workers
    for worker in workers.all:
        worker.close()


def resharding(workers: Workers, tp: tuple[int, int], sizes: tuple[int, int], layout: str) -> tuple[Worker, Worker]:
    return (
        workers.start(tp[0], MODEL, sizes[0], layout),
        workers.start(tp[1], MODEL, sizes[1], layout, verify="all"),
    )


PAIRS = [((1, 2), (16, 16)), ((2, 1), (16, 16)), ((1, 1), (64, 32)), ((2, 1), (64, 32)), ((1, 2), (32, 64))]


@pytest.mark.parametrize("layout", ["LBHNC", "LHBNC", CPU_PLANES])
@pytest.mark.parametrize(("tp", "sizes"), PAIRS, ids=str)
def test_workers_with_other_ranks_and_blocks_verify_cleanly(
    workers: Workers, tp: tuple[int, int], sizes: tuple[int, int], layout: str
) -> None:
    exporter, importer = resharding(workers, tp, sizes, layout)
    hand_over(exporter, importer, num_tokens=130)
    assert set(exporter.closed_exports()) == {"released"}


@pytest.mark.parametrize(("tp", "sizes"), PAIRS, ids=str)
def test_a_flipped_bit_is_found_by_the_rank_that_has_it(
    workers: Workers, tp: tuple[int, int], sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, importer = resharding(workers, tp, sizes, "LBHNC")
    theirs, ours = (list(range(5, 5 + -(-130 // size))) for size in sizes)
    prompt, is_flipped = MODEL.prompt(130), threading.Event()
    bad_block = ours[1]

    def flipped(piece: Piece) -> None:
        """Of the last rank, one bit of the second block's last token, once all of the block has come."""
        layer = importer.caches[-1].layers[1]
        if layer[bad_block, 0, -1, 0] and not is_flipped.is_set():
            layer[bad_block, 0, -1, 0] ^= 1
            is_flipped.set()

    after_each_copy(monkeypatch, flipped)
    importer.attach("t", exporter, 130)
    importer.place("t", ours)
    exporter.compute("t", prompt, theirs)
    closed = importer.closed_imports()[-1]
    assert (closed.outcome, closed.failure_kind) == ("recompute", "checksum")
    assert bad_block in closed.bad_block_ids


@pytest.fixture
def gpus(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuCluster]:
    with GpuCluster(directory, monkeypatch).closing() as cluster:
        yield cluster


@pytest.mark.parametrize("link", ["cuda_ipc", "nccl", "zmq"])
def test_caches_on_gpus_are_compared_through_pinned_memory(
    gpus: GpuCluster, link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = gpus.rank(links=(link,))
    importer = gpus.rank(links=(link,), verify="all", chunk_bytes=1 << 16, device=1)
    assert transfer(exporter, importer).outcome == "loaded"
    assert importer.holds(OURS, exporter, THEIRS)

    def flipped(piece: Piece) -> None:
        if OURS[3] in piece.target_ids and piece.first_layer == 0:
            region = importer.map.layers[0][0]
            importer.process.view(region.base_address + OURS[3] * region.block_stride_bytes, 1)[0] ^= 1

    after_each_copy(monkeypatch, flipped)
    assert transfer(exporter, importer, "u").bad_block_ids == OURS[3:]


def test_a_gpu_without_memory_for_checksums_is_a_failure_with_a_name(
    gpus: GpuCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, importer = gpus.rank(), gpus.rank(verify="all")

    def no_memory(*_: object) -> None:
        raise CudaUnusable("no pinned memory is left")

    monkeypatch.setattr("kvtransfer.gpu.gpu_links.StagedMemory", no_memory)
    closed = transfer(exporter, importer)
    assert (closed.outcome, closed.failure_kind) == ("recompute", "transport")
    assert closed.reason == "no checksums: no pinned memory is left"
