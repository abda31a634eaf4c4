"""Almost-messages at both ends of a pair: a `BadFrame` or a message, and never anything that stops the endpoint.

The decisions are driven without sockets, with everything the endpoint's threads would do to what was decided.
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer import messages
from kvtransfer.copy_plan import plan_copy
from kvtransfer.endpoint.copy_threads import CopyResult
from kvtransfer.endpoint.exporting.exporter import Exporter
from kvtransfer.endpoint.frames import BadFrame, encode, from_exporter, from_importer
from kvtransfer.endpoint.importing.importer import Importer
from kvtransfer.endpoint.loop import _LocalMemory
from kvtransfer.endpoint.peers import PeerKey, RankIdentity
from kvtransfer.endpoint.settings import EndpointSettings
from kvtransfer.layout import CacheMap, probe
from kvtransfer.links.host_memory import MemoryReadError, host_id, read_memory
from kvtransfer.links.zmq_frames import HostMemory
from kvtransfer.resharding.forms import TOKEN_ROWS
from kvtransfer.verification.check_thread import CheckResult
from kvtransfer.verification.checksums import checksums
from tests.unit.kvtransfer.rank_pair import FACTS, NUM_BLOCKS, PROMPT_HASH, Cluster, eventually, make_cache
from tests.unit.mutations import DEEP, mutated

SETTINGS = EndpointSettings(rank=0, bind="ipc://nowhere", links=("host", "zmq"), chunk_bytes=1500, verify="all")
IDENTITY = RankIdentity("me", "this machine", os.getpid())
PEER = PeerKey("ipc://nowhere", "fake")
TIMES = settings(max_examples=60)


def cache_map(block_size: int) -> CacheMap:
    """One that can be cut into heads and tokens."""
    facts = replace(FACTS, block_size=block_size, total_kv_heads=2, content_format=TOKEN_ROWS)
    shape = (NUM_BLOCKS, 2, block_size, 8)
    return probe({f"layers.{layer}": np.zeros(shape, dtype=np.uint16) for layer in range(3)}, NUM_BLOCKS, facts)


WHOLE = probe(make_cache(1), NUM_BLOCKS, FACTS)
CUT, CUT_LARGE = cache_map(4), cache_map(8)
PAIRS = st.sampled_from([(WHOLE, WHOLE), (CUT, CUT), (CUT, CUT_LARGE), (CUT_LARGE, CUT)])
LINKS = st.sampled_from(["host", "zmq"])


def blocks_of(cache: CacheMap, *block_ids: int) -> list[int]:
    """As many as 12 tokens take."""
    return list(block_ids)[: -(-12 // cache.layout.block_size)]


def said_by_exporter(cache: CacheMap, link: str) -> list[messages.FromExporter]:
    regions = [
        messages.MemoryRegion(region.base_address, region.block_stride_bytes, region.num_blocks)
        for layer in cache.layers
        for region in layer
    ]
    ids = blocks_of(cache, 1, 2, 3)
    memory = regions if link == "host" else []
    return [
        messages.Welcome("fake", 0, link, "for a test", os.getpid(), memory, [], cache.layout.form),
        messages.Attached("t", 100.0),
        messages.Ready("t", 0, 0, ids, 12),
        messages.Done("t", 0, 12, PROMPT_HASH, 7),
        messages.Ready("t", 1, 0, ids, 12, num_layers=1),
        messages.Checksums("t", 1, [1, 2, 3]),
        messages.BeatAck(100.0, ["t"], ["x"]),
        messages.Failed("x", "transport", "reason"),
        messages.Blocks("t", 1, 100),
        messages.Refused("fake", "reason", ["x"]),
        messages.CommOffer(0, 1000, b"id"),
        messages.CommBroken(0, "reason", True),
        messages.Sending(0, 0, 1, 100),
    ]


def said_by_importer(cache: CacheMap, link: str) -> list[messages.FromImporter]:
    layout = cache.layout
    fields, form = layout.fields(), layout.form
    return [
        messages.Hello("you", 0, layout.fingerprint(), fields, "this machine", [link], "me", os.getpid(), form=form),
        messages.Attach("t", "me", 12, PROMPT_HASH, True, 1),
        messages.Attach("u", "me", 12, PROMPT_HASH, True, 1),
        messages.Fetch("t", 0, 1, 0, 3, blocks_of(cache, 1, 2)),
        messages.Fetch("u", 0, 2, 0, 3, blocks_of(cache, 1, 2, 3)),
        messages.Check("u", 0, 1, blocks_of(cache, 1, 2, 3)),
        messages.Release("x", 5, 0.1),
        messages.Failed("x", "transport", "reason"),
        messages.Beat(["t", "u"]),
        messages.CommRequest(0, 1000),
        messages.CommBroken(0, "reason", True),
    ]


def say(data: st.DataObject, valid: list[messages.FromExporter] | list[messages.FromImporter],
        hear: Callable[[bytes], None]) -> None:  # fmt: skip
    """A conversation that goes well up to some point and badly from there on."""
    for message in valid[: data.draw(st.integers(0, 5))]:
        hear(encode(message))
    for frame in data.draw(st.lists(mutated(valid), min_size=1, max_size=6)):
        hear(frame)


@TIMES
@given(data=st.data(), pair=PAIRS, link=LINKS)
def test_no_frame_of_an_exporter_stops_the_importer(
    data: st.DataObject, pair: tuple[CacheMap, CacheMap], link: str
) -> None:
    theirs, ours = pair
    importer = Importer(SETTINGS, ours, IDENTITY, _LocalMemory(HostMemory()))
    importer.open(0.0, "t", [PEER], PROMPT_HASH, 12, False)
    importer.place(0.0, "t", 0, blocks_of(ours, 7, 8, 9))

    def hear(frame: bytes) -> None:
        payload = data.draw(st.none() | st.just(memoryview(bytes(100))))
        with contextlib.suppress(BadFrame):
            importer.receive(1.0, PEER, from_exporter(frame), payload)
        importer.pump(1.0)
        importer.sweep(1.0)
        for _, message in importer.outbox:
            encode(message)
        jobs, importer.copies[:] = importer.copies[:], []
        for job in jobs:
            kind = ""
            try:
                source_ids, target_ids = job.piece.source_ids, job.piece.target_ids
                read_memory(job.pid, plan_copy(source_ids, target_ids, job.sources, job.targets))
            except MemoryReadError as error:
                kind = error.failure_kind
            importer.copied(CopyResult(job, 0.1, 1.0, kind, "for a test"))
        importer.outbox.clear()
        for check in importer.checks.jobs:
            values = checksums(HostMemory(), check.block_ids, check.layers, 4096, lambda: False)
            importer.checks.computed(1.0, CheckResult(check, values))
        importer.checks.jobs.clear()
        importer.peers()

    say(data, said_by_exporter(theirs, link), hear)


@TIMES
@given(data=st.data(), pair=PAIRS, link=LINKS)
def test_no_frame_of_an_importer_stops_the_exporter(
    data: st.DataObject, pair: tuple[CacheMap, CacheMap], link: str
) -> None:
    ours, theirs = pair
    memory, exporter, ids = HostMemory(), Exporter(SETTINGS, ours, IDENTITY), blocks_of(ours, 1, 2, 3)
    exporter.open(0.0, "t", PROMPT_HASH, 12)
    exporter.announce(0.0, "t", ids[:2], 8)
    exporter.open(0.0, "u", PROMPT_HASH, 12)
    exporter.finish(0.0, "u", ids, 12, 7)

    def hear(frame: bytes) -> None:
        with contextlib.suppress(BadFrame):
            exporter.receive(1.0, b"someone", from_importer(frame))
        exporter.sweep(1.0)
        for _, pid in exporter.welcomed:
            with contextlib.suppress(OSError):  # as the endpoint's thread does
                os.close(os.pidfd_open(pid))
        while served := exporter.next_fetch():
            importer, fetch = served
            memory.gather(fetch.block_ids, exporter.regions(importer, fetch))
        for check in exporter.checks.jobs:
            values = checksums(memory, check.block_ids, check.layers, 4096, lambda: False)
            exporter.checked(CheckResult(check, values))
        exporter.checks.jobs.clear()
        for _, message in exporter.outbox:
            encode(message)
        exporter.outbox.clear()
        exporter.welcomed.clear()
        exporter.leases()

    say(data, said_by_importer(theirs, link), hear)


@pytest.mark.parametrize(
    "message",
    [messages.Ready("t", 0, 0, [1 << 63], 8), messages.Attached("t", float("nan")), messages.Release("t", -1)],
    ids=["a block id that no cache has", "a time that is none", "less than nothing"],
)
def test_numbers_out_of_bounds_make_a_bad_frame(message: messages.FromExporter | messages.Release) -> None:
    with pytest.raises(BadFrame, match="Expected"):
        (from_importer if isinstance(message, messages.Release) else from_exporter)(encode(message))


def test_an_importer_with_a_process_id_that_is_none_does_not_stop_the_exporter(cluster: Cluster) -> None:
    exporter = cluster.rank()
    layout = exporter.map.layout
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(exporter.endpoint.address)
        for pid in (1 << 40, (1 << 31) - 1):
            hello = messages.Hello(
                "you", 0, layout.fingerprint(), layout.fields(), host_id(), ["zmq"], exporter.endpoint.epoch, pid
            )
            socket.send(msgspec.msgpack.encode(hello))
        release = msgspec.msgpack.encode(messages.Release("t"))
        socket.send(bytes([release[0] + 1]) + release[1:] + b"\xa4more" + DEEP)
        eventually(lambda: exporter.endpoint.stats().bad_frames == 2)
    exporter.endpoint.check()
