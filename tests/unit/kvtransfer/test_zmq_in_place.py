"""Frames that are filled where they lie."""

import gc
import resource

import numpy as np
import pytest
import zmq

from kvtransfer.links.zmq_in_place import FrameInPlace


def test_what_was_filled_in_is_what_arrives() -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        ours.bind("inproc://in-place")
        theirs.connect("inproc://in-place")
        theirs.rcvtimeo = 5000
        for num_bytes in (0, 1, 100_000):
            frame = FrameInPlace(num_bytes)
            frame.array[:] = np.arange(num_bytes) % 251
            ours.send(b"header", zmq.SNDMORE)
            frame.send(ours)
            assert theirs.recv_multipart() == [b"header", (np.arange(num_bytes) % 251).astype(np.uint8).tobytes()]


def test_a_frame_that_cannot_be_sent_says_so_and_can_be_sent_later() -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        ours.sndtimeo = 0
        frame = FrameInPlace(3)
        frame.array[:] = [1, 2, 3]
        with pytest.raises(zmq.Again):
            frame.send(ours)
        ours.bind("inproc://later")
        theirs.connect("inproc://later")
        theirs.rcvtimeo = ours.sndtimeo = 5000
        frame.send(ours)
        assert theirs.recv() == b"\1\2\3"


def test_frames_that_are_never_sent_leave_no_memory_behind() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(200):
        FrameInPlace(4 << 20).array[:] = 1
    gc.collect()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10, "800 MB passed through"


def test_a_frame_of_absurd_size_is_refused() -> None:
    with pytest.raises(MemoryError, match="no memory for a message"):
        FrameInPlace(1 << 60)
