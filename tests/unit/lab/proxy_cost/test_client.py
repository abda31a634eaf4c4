"""Events of a stream are counted without being parsed, however the bytes are cut."""

import pytest

from lab.proxy_cost.client import EventCounter, WrongAnswer

STREAM = (
    b'data: {"choices":[{"text":" a"}]}\n\n'
    b'data: {"choices":[{"text":" b"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":128,"total_tokens":130,"completion_tokens":2}}\n\n'
    b"data: [DONE]\n\n"
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 36, len(STREAM)])
def test_events_are_counted_however_the_stream_is_cut(size: int) -> None:
    counter = EventCounter()
    for start in range(0, len(STREAM), size):
        counter.feed(STREAM[start : start + size])
    assert counter.events == 4
    assert counter.usage() == (128, 2)


def test_a_stream_that_breaks_off_is_no_answer() -> None:
    counter = EventCounter()
    counter.feed(STREAM[:-20])
    with pytest.raises(WrongAnswer, match="did not end"):
        counter.usage()
