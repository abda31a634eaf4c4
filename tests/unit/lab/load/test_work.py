import pytest

from lab.load.work import WorkClass, WorkError, parse_work


def test_a_class_is_read_with_its_limits() -> None:
    work = parse_work("chat=0.5/s,128+64,ttft=3,itl=0.1")
    assert work == WorkClass("chat", 0.5, 128, 64, ttft_s=3.0, itl_s=0.1)


def test_turns_grow_by_what_was_said() -> None:
    work = parse_work("talk=1/s,100+20,turns=3,shared=60,think=0.5")
    assert [work.prompt_tokens_of_turn(turn) for turn in range(3)] == [100, 160, 220]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("chat", "the form is"),
        ("chat=0.5,128+64", "the form is"),
        ("chat=0/s,128+64", "more than 0"),
        ("chat=1/s,128+0", "at least 1"),
        ("chat=1/s,128+64,ttfb=3", "ttfb"),
        ("chat=1/s,128+64,turns=two", "no number"),
        ("chat=1/s,128+64,shared=128", "longer than what is shared"),
    ],
)
def test_what_cannot_be_used_is_named(text: str, complaint: str) -> None:
    with pytest.raises(WorkError, match=complaint):
        parse_work(text)
