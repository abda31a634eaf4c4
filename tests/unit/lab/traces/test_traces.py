from dataclasses import replace
from pathlib import Path

import pytest

import lab.traces
from lab.load.plan import replay
from lab.traces.formats import TraceError, read_trace
from lab.traces.trace import Scaling, TraceRequest, block_hit_rate, scale

SAMPLES = Path(lab.traces.__file__).parent / "samples"


@pytest.mark.parametrize("name", ["azure.csv", "mooncake.jsonl", "burstgpt.csv"])
def test_samples_of_every_format_are_read_in_order(name: str) -> None:
    trace = read_trace(SAMPLES / name)
    assert 15 < len(trace) <= 24
    assert trace[0].at_s == 0
    assert [r.at_s for r in trace] == sorted(r.at_s for r in trace)
    assert all(r.prompt_tokens > 0 and r.output_tokens > 0 for r in trace)
    assert any(r.block_ids for r in trace) == (name == "mooncake.jsonl")


def test_times_of_every_published_form_are_understood(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05,1,0\n"
        "2023-11-16 18:17:06.5+00:00,7,8\n"
    )
    trace = read_trace(file)
    assert [round(r.at_s, 4) for r in trace] == [0, 1.02, 2.52]
    assert trace[1].output_tokens == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a,b\n1,2\n", "no trace of Azure"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,many,10\n", "line 2"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 2}\n{"timestamp": "x"}\n', "line 2"),
        ("Timestamp,Request tokens,Response tokens\n5,100,0\n", "no request"),
    ],
)
def test_what_is_no_trace_is_named_with_its_line(text: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(TraceError, match=complaint):
        read_trace(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.csv")


def test_scaling_keeps_the_rhythm_and_what_is_shared() -> None:
    trace = [TraceRequest(float(i), 1000 + i, 100, (0, i + 1), 512) for i in range(200)]
    faster = scale(trace, Scaling(speed=4, lengths=0.1, seconds=10))
    assert len(faster) == 40
    assert (faster[8].at_s, faster[8].prompt_tokens, faster[8].output_tokens, faster[8].block_tokens) == (
        2,
        101,
        10,
        51,
    )
    thinner = scale(trace, Scaling(share=0.5), seed=3)
    assert 70 < len(thinner) < 130
    assert thinner == scale(trace, Scaling(share=0.5), seed=3)
    assert {r.at_s for r in thinner} <= {r.at_s for r in trace}
    assert all(r.prompt_tokens <= 1050 for r in scale(trace, Scaling(max_prompt_tokens=1050)))


def test_equal_blocks_become_equal_text_and_the_rest_is_the_requests_own() -> None:
    trace = [TraceRequest(0, 1200, 5, (7, 8), 512), TraceRequest(1, 900, 5, (7, 9), 512)]
    first, second = (session.turns[0].pieces for session in replay(trace, "trace", seed=1))
    assert [piece.num_tokens for piece in first] == [512, 512, 176]
    assert [piece.num_tokens for piece in second] == [512, 388]
    assert first[0] == second[0]
    assert len({piece.seed for piece in (*first, *second)}) == 4


def test_hits_count_only_behind_a_hit() -> None:
    blocks = [(1, 2, 3), (1, 2, 4), (9, 2, 3)]
    trace = [TraceRequest(0, 3, 1, ids, 1) for ids in blocks]
    assert block_hit_rate(trace) == pytest.approx(2 / 9)
    assert block_hit_rate([replace(r, block_ids=()) for r in trace]) == 0
