"""Who gets the tokens of a step."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefill.chunk_order import (
    HOLD_UP,
    MIN_CHUNK_TOKENS,
    PATIENCE,
    Prefill,
    by_urgency,
    effective_deadline_s,
    held_up_s,
    owed_a_share,
    share_out,
    step_s,
)

TOKEN_S = 0.001


def takes_s(num_tokens: int, _before: int) -> float:
    return num_tokens * TOKEN_S


def prompt(
    name: str, tokens: int, *, arrival_s: float = 0.0, ttft_s: float = 3.0, left: int | None = None, priority: int = 0
) -> Prefill:
    return Prefill(
        request_id=name,
        arrival_s=arrival_s,
        deadline_s=arrival_s + ttft_s,
        priority=priority,
        tokens_left=tokens if left is None else left,
        tokens_total=tokens,
    )


def shares(prefills: list[Prefill], now_s: float, budget: int = 512, fill: int = 0) -> dict[str, int]:
    ranked = by_urgency(prefills, now_s, takes_s)
    return share_out(ranked, budget, fill, owed_a_share(ranked, now_s, takes_s))


def test_a_long_prompt_steps_aside_for_a_short_one_with_an_earlier_deadline() -> None:
    assert shares([prompt("long", 3000, ttft_s=30.0, left=2488), prompt("short", 100, arrival_s=0.5)], 0.6) == {
        "short": 100
    }


def test_others_ride_along_until_the_step_is_economical() -> None:
    both = [prompt("long", 3000, ttft_s=30.0), prompt("short", 100)]
    assert shares(both, 0.0, fill=300) == {"short": 100, "long": 200}
    assert shares(both, 0.0, fill=512) == {"short": 100, "long": 412}


def test_the_most_urgent_prompt_gets_the_whole_budget_if_it_can_use_it() -> None:
    assert shares([prompt("long", 3000, ttft_s=1.0), prompt("short", 100, ttft_s=9.0)], 0.0) == {"long": 512}


def test_who_has_time_is_worked_on_in_short_steps_for_those_who_may_come() -> None:
    report = replace(prompt("report", 3000, ttft_s=8.0), longest_step_s=0.5)
    chat = prompt("chat", 100, arrival_s=0.2)
    assert step_s([report], 0.0, takes_s) == 0.5
    assert step_s([report, chat], 4.0, takes_s) == 0.5
    assert step_s([report], 4.5, takes_s) == inf, "short steps would make it late"
    assert step_s([replace(report, tokens_left=100)], 7.0, takes_s) == 0.5
    assert step_s([chat, report], 0.2, takes_s) == inf, "nobody is stricter"


def test_others_ride_along_only_as_far_as_all_who_can_be_in_time_still_are() -> None:
    chats = [prompt(f"chat-{n}", 100, ttft_s=1.0) for n in range(3)]
    report = prompt("report", 3000, ttft_s=8.0)
    assert held_up_s(chats[:1], 0.5, takes_s) == pytest.approx(HOLD_UP * 0.4)
    assert held_up_s([*chats, report], 0.5, takes_s) == pytest.approx(HOLD_UP * 0.2), "the last chat ends at 0.8"
    assert held_up_s([*chats, report], 0.75, takes_s) == pytest.approx(HOLD_UP * 0.05), "the last one is late anyway"
    assert held_up_s(chats, 2.0, takes_s) == inf, "nobody can be in time"


def test_priority_goes_before_deadline() -> None:
    first = prompt("first", 100, ttft_s=50.0, priority=-1)
    second = prompt("second", 100, ttft_s=1.0)
    assert [p.request_id for p in by_urgency([second, first], 0.0, takes_s)] == ["first", "second"]


def test_who_holds_blocks_in_the_queue_goes_before_everybody() -> None:
    holder = replace(prompt("holder", 100, ttft_s=50.0, priority=5), ahead=True)
    assert by_urgency([prompt("other", 100, priority=-5), holder], 0.0, takes_s)[0] is holder


def test_a_deadline_that_cannot_be_met_makes_nobody_else_late() -> None:
    hopeless = prompt("hopeless", 9000, ttft_s=3.0)
    short = prompt("short", 100, arrival_s=2.0)
    assert by_urgency([hopeless, short], 2.0, takes_s)[0] is short


def test_a_deadline_slips_only_so_far() -> None:
    late = prompt("late", 1000, ttft_s=0.5)
    assert effective_deadline_s(late, 2.0, takes_s) == 3.0
    assert effective_deadline_s(late, 100.0, takes_s) == PATIENCE * 1.0


def test_a_prompt_that_waited_too_long_keeps_a_share_against_any_priority() -> None:
    patient = prompt("patient", 2000, ttft_s=1.0, priority=9)
    urgent = [prompt(f"urgent-{n}", 400, arrival_s=8.0, priority=-9) for n in range(5)]
    assert "patient" not in shares([patient, *urgent], PATIENCE * 2.0 - 0.1)
    assert shares([patient, *urgent], PATIENCE * 2.0 + 0.1)["patient"] == 512 // 8


def test_a_prompt_that_may_still_be_in_time_takes_no_share_from_a_more_urgent_one() -> None:
    short = prompt("short", 128, ttft_s=3.0)
    long = prompt("long", 476, ttft_s=2.9)
    assert shares([short, long], 2.0) == {"long": 476}


def test_who_may_not_be_admitted_takes_nothing_from_who_runs() -> None:
    doubtful = replace(prompt("doubtful", 100, ttft_s=0.1), certain=False)
    long = prompt("long", 3000, ttft_s=30.0)
    assert shares([doubtful, long], 0.0) == {"long": 512}
    assert shares([doubtful], 0.0) == {"doubtful": 100}


prompts = st.lists(
    st.builds(
        Prefill,
        request_id=st.uuids().map(str),
        arrival_s=st.floats(0, 100),
        deadline_s=st.floats(-10, 300),
        priority=st.integers(-2, 2),
        tokens_left=st.integers(1, 5000),
        tokens_total=st.integers(1, 5000),
        ahead=st.booleans(),
        certain=st.booleans(),
    ),
    max_size=8,
)


@settings(max_examples=50)
@given(prompts, st.integers(0, 2048), st.integers(0, 2048), st.floats(0, 200))
def test_the_budget_is_kept_and_never_idle_while_somebody_could_use_it(
    prefills: list[Prefill], budget: int, fill: int, now_s: float
) -> None:
    given_ = shares(prefills, now_s, budget, fill)
    wanted = {p.request_id: p.tokens_left for p in prefills}
    assert sum(given_.values()) <= budget
    assert all(0 < tokens <= wanted[name] for name, tokens in given_.items())
    assert sum(given_.values()) > min(budget, fill, sum(wanted.values())) - MIN_CHUNK_TOKENS
    assert given_ or not prefills or budget == 0


@settings(max_examples=50)
@given(prompts, st.randoms(use_true_random=False), st.floats(0, 200))
def test_the_order_depends_on_the_prompts_alone(prefills: list[Prefill], random: object, now_s: float) -> None:
    shuffled = list(prefills)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert by_urgency(shuffled, now_s, takes_s) == by_urgency(prefills, now_s, takes_s)
    assert shares(shuffled, now_s) == shares(prefills, now_s)


@settings(max_examples=50)
@given(prompts, st.floats(0, 200), st.integers(1, 2048))
def test_the_most_urgent_prompt_always_gets_something(prefills: list[Prefill], now_s: float, budget: int) -> None:
    certain = [replace(p, certain=True) for p in prefills]
    if certain:
        assert by_urgency(certain, now_s, takes_s)[0].request_id in shares(certain, now_s, budget)


def finish_s(victim: Prefill, newcomer_tokens: int, newcomer_priority: int, fill: int) -> float:
    """When `victim` is done, if a newcomer arrives whenever the last one is done."""
    now_s, newcomers = 0.0, 0
    live = {victim.request_id: victim}
    while victim.request_id in live:
        if now_s > 1000:
            return now_s
        if len(live) == 1:
            newcomers += 1
            name = f"new-{newcomers}"
            live[name] = prompt(name, newcomer_tokens, arrival_s=now_s, ttft_s=1.0, priority=newcomer_priority)
        for name, tokens in shares(list(live.values()), now_s, 512, fill).items():
            now_s += tokens * TOKEN_S
            live[name] = replace(live[name], tokens_left=live[name].tokens_left - tokens)
        live = {name: p for name, p in live.items() if p.tokens_left > 0}
    return now_s


@pytest.mark.parametrize("priority", [-1, 0])
@pytest.mark.parametrize("newcomer_tokens", [20, 100, 500, 3000])
@pytest.mark.parametrize("fill", [0, 200])
def test_an_endless_stream_of_urgent_prompts_starves_nobody(priority: int, newcomer_tokens: int, fill: int) -> None:
    victim = prompt("victim", 3000, ttft_s=30.0)
    own_s = 3.0
    # The deadline or the patience, and then an eighth of the engine.
    assert finish_s(victim, newcomer_tokens, priority, fill) <= 30.0 + PATIENCE * own_s + 8 * own_s
