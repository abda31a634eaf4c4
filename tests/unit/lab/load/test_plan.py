import random
import statistics
import zlib
from itertools import pairwise

import pytest

from lab.load.arrivals import Process, arrival_times
from lab.load.plan import plan_sessions
from lab.load.prompts import Prompts
from lab.load.work import parse_work


@pytest.mark.parametrize(("process", "cv"), [("poisson", 1.0), ("gamma", 3.0), ("gamma", 0.5), ("even", 0.0)])
def test_gaps_have_the_mean_and_the_spread_they_were_asked_for(process: Process, cv: float) -> None:
    times = arrival_times(process, rate_per_s=5, seconds=4000, rng=random.Random(3), cv=cv)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times == sorted(times)
    assert times[-1] < 4000
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.07)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.1, abs=1e-6)


def test_the_same_seed_is_the_same_work_whatever_else_is_sent() -> None:
    chat, batch = parse_work("chat=2/s,8+4"), parse_work("batch=1/s,20+1")
    alone = plan_sessions([chat], 50, seed=7)
    together = plan_sessions([chat, batch], 50, seed=7)
    assert [s.start_s for s in together if s.work == "chat"] == [s.start_s for s in alone]
    assert together == plan_sessions([chat, batch], 50, seed=7)
    assert together != plan_sessions([chat, batch], 50, seed=8)
    assert [s.start_s for s in together] == sorted(s.start_s for s in together)


def test_other_texts_are_the_same_load_in_words_that_no_cache_has_seen() -> None:
    classes = [parse_work("talk=5/s,40+4,turns=2,shared=25"), parse_work("batch=1/s,20+1")]
    loads = [plan_sessions(classes, 20, seed=seed, texts=texts) for seed, texts in [(7, 0), (7, 1), (8, 0), (8, 1)]]
    assert [(s.start_s, s.work, s.number) for s in loads[0]] == [(s.start_s, s.work, s.number) for s in loads[1]]
    articles = [{piece.seed for session in load for turn in session.turns for piece in turn.pieces} for load in loads]
    assert len(set.union(*articles)) == sum(map(len, articles))


def test_prompts_have_exactly_their_length_and_share_what_they_should() -> None:
    (work,) = [parse_work("talk=5/s,40+4,turns=2,shared=25")]
    prompts = Prompts(lambda text: [zlib.crc32(word.encode()) for word in text.split()])
    sessions = plan_sessions([work], 3, seed=1)
    firsts = [prompts.of(session.turns[0]) for session in sessions]
    assert {len(first) for first in firsts} == {40}
    assert len({tuple(first[:25]) for first in firsts}) == 1
    assert len({tuple(first[25:]) for first in firsts}) == len(firsts) > 5
    assert {len(prompts.of(session.turns[1])) for session in sessions} == {15}
