"""A worker without the adapter of a request is never given it."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.scheduling.place import Decision, Local, PrefillOnly, Reject, Remote, Wait
from proxy.scheduling.scheduler import Scheduler
from proxy.scheduling.view import AdapterView
from tests.unit.proxy.scheduling.situations import POLICY, Caches, facts, first_place, placed, shape

POET = 7
WORKERS = ("p0", "p1", "d0", "d1")
OFFERED = shape(500, adapter=POET)


def pools(*with_adapter: str, known: Iterable[int] = (POET,), policy: Any = POLICY, prefixes: Any = None) -> Scheduler:
    made = Scheduler(policy, prefixes)
    observe(made, with_adapter, known, 0.0)
    return made


def observe(scheduler: Scheduler, with_adapter: Iterable[str], known: Iterable[int], now_s: float) -> None:
    view = AdapterView(frozenset(known), frozenset((name, POET) for name in with_adapter))
    scheduler.observe_pools([facts(name) for name in WORKERS], frozenset(), now_s, adapters=view)


def test_both_legs_go_where_the_adapter_is() -> None:
    assert first_place(pools("p1", "d1"), OFFERED) == Remote("p1", "d1", "remote")
    assert first_place(pools("p1", "d1"), shape(500, max_tokens=1, adapter=POET)) == PrefillOnly("p1", "single_token")
    assert first_place(pools("p1", "d1"), shape(20, adapter=POET)) == Local("d1", "short_prompt")


def test_the_base_model_is_everywhere() -> None:
    assert first_place(pools(known=()), shape(500)) == Remote("p0", "d0", "remote")


def test_a_cached_prefix_does_not_draw_a_request_to_a_worker_without_its_adapter() -> None:
    known = Caches({"d0": {(1,): 450}, "p0": {(1,): 450}})
    prompt = shape(500, adapter=POET, prompt_hashes=(1,))
    assert first_place(pools("p1", "d1", prefixes=known), prompt) == Remote("p1", "d1", "remote")


def test_without_a_prefill_worker_that_has_it_the_policy_decides() -> None:
    assert first_place(pools("d1"), OFFERED) == Local("d1", "no_adapter")
    waiting = pools("d1", policy=replace(POLICY, on_no_prefill="queue"))
    assert first_place(waiting, OFFERED) == Wait("no_adapter")


def test_without_a_decode_worker_that_has_it_a_request_waits_and_goes_when_one_has_loaded_it() -> None:
    waiting = pools("p0")
    assert first_place(waiting, OFFERED, "r") == Wait("no_adapter")
    observe(waiting, ("p0", "d1"), (POET,), 1.0)
    assert placed(waiting.place(1.0)) == {"r": Remote("p0", "d1", "remote")}


def test_an_adapter_that_was_removed_since_is_a_404() -> None:
    assert first_place(pools(known=()), OFFERED) == Reject(
        404, "no_adapter", "The adapter that this request names as its model has been removed."
    )
    waiting = pools("p0")
    waiting.add("r", OFFERED, 0.0, 0.0)
    waiting.place(0.0)
    observe(waiting, (), (), 1.0)
    (decision,) = waiting.place(1.0)
    assert isinstance(decision, Decision)
    assert isinstance(decision.placement, Reject)


def test_loading_an_adapter_does_not_forget_what_workers_do() -> None:
    busy = pools()
    assert first_place(busy, shape(500), "a") == Remote("p0", "d0", "remote")
    observe(busy, WORKERS, (POET,), 0.1)
    assert first_place(busy, shape(500), "b", 0.1) == Remote("p1", "d1", "remote")


@pytest.mark.parametrize("avoid", ["", "p1", "d1"])
@given(holders=st.sets(st.sampled_from(WORKERS)), num_tokens=st.integers(1, 9000), max_tokens=st.integers(1, 50))
def test_whatever_is_decided_the_workers_have_the_adapter(
    avoid: str, holders: set[str], num_tokens: int, max_tokens: int
) -> None:
    place = first_place(pools(*holders), shape(num_tokens, max_tokens, adapter=POET, avoid=avoid))
    used = {getattr(place, role, "") for role in ("prefill", "decode")} - {""}
    assert used <= holders
