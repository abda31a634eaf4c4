"""The queue of the cluster: who goes next, who waits for what, and that everything taken is given back."""

from dataclasses import replace
from typing import Any

import pytest

from proxy.scheduling.place import Local, PrefillOnly, Reject, Remote, Wait
from proxy.scheduling.scheduler import Scheduler
from proxy.scheduling.view import RequestShape
from tests.unit.proxy.scheduling.situations import POLICY, Caches, facts, first_place, placed, scheduler, shape


def fill(pools: Scheduler, *request_ids: str, now_s: float = 0.0) -> None:
    """Keeps a prefill worker busy: one prompt computed, one ready."""
    for request_id in request_ids:
        pools.add(request_id, shape(1500, tenant="filler"), now_s, now_s)
    assert all(isinstance(p, Remote) for p in placed(pools.place(now_s)).values())


def order_of(pools: Scheduler, *request_ids: str, now_s: float = 1.0) -> list[str]:
    """The order in which waiting requests go as prefills end, one a second."""
    order: list[str] = []
    running = list(pools.books.held)
    while len(order) < len(request_ids):
        now_s += 1.0
        pools.complete(running.pop(0), now_s)
        went = [d.request_id for d in pools.place(now_s) if not isinstance(d.placement, Wait)]
        assert pools.books.pools.prefill["p0"].jobs, "a worker stands idle while requests wait"
        order += went
        running += went
    return order


def wait_for_turn(pools: Scheduler, **requests: RequestShape) -> list[str]:
    for number, (request_id, request) in enumerate(requests.items()):
        assert isinstance(first_place(pools, request, request_id, 0.01 * number), Wait)
    return order_of(pools, *requests)


@pytest.fixture
def busy() -> Scheduler:
    pools = scheduler("p0", "d0")
    fill(pools, "f0", "f1")
    return pools


# ------------------------------------------------------------------------------------------------- late binding


def test_a_worker_gets_one_prompt_to_compute_and_one_ahead_however_long(busy: Scheduler) -> None:
    assert first_place(busy, shape(1500)) == Wait("prefill_full")
    busy.complete("f0", 1.5)
    assert placed(busy.place(1.5)) == {"r": Remote("p0", "d0", "remote")}


def test_a_worker_gets_about_two_chunk_budgets_of_short_prompts_ahead() -> None:
    pools = scheduler("p0", "d0")
    for number in range(20):
        pools.add(str(number), shape(128), 0.0, 0.0)
    ahead = [d for d in pools.place(0.0) if isinstance(d.placement, Remote)]
    assert len(ahead) == 2 * 512 / 128
    assert pools.num_waiting == 20 - len(ahead)


def test_a_more_urgent_prompt_is_sent_at_once_behind_less_urgent_ones(busy: Scheduler) -> None:
    """The engine computes the most urgent chunk first, so nothing is before it there."""
    assert first_place(busy, shape(1500, ttft_s=0.5)) == Remote("p0", "d0", "remote")


def test_the_prefill_worker_that_is_free_first_is_taken() -> None:
    pools = scheduler("p0", "p1", "d0")
    assert first_place(pools, shape(3000), "a") == Remote("p0", "d0", "remote")
    assert first_place(pools, shape(500), "b") == Remote("p1", "d0", "remote")
    assert first_place(pools, shape(500), "c") == Remote("p1", "d0", "remote")


# -------------------------------------------------------------------------------------------------------- order


def test_the_earliest_deadline_goes_first(busy: Scheduler) -> None:
    waiting = {"late": shape(1500, ttft_s=9), "early": shape(1500, ttft_s=5), "middle": shape(1500, ttft_s=7)}
    assert wait_for_turn(busy, **waiting) == ["early", "middle", "late"]


def test_priority_goes_before_deadline(busy: Scheduler) -> None:
    # Sent at once it would be ahead of all: let the worker be full of urgent ones.
    for number in range(2):
        first_place(busy, shape(1500, priority=-9, tenant="filler"), f"urgent{number}")
    waiting = {
        "soon": shape(1500, ttft_s=13, priority=1),
        "important": shape(1500, ttft_s=30, priority=-1),
        "plain": shape(1500, ttft_s=14),
    }
    for request_id, request in waiting.items():
        assert isinstance(first_place(busy, request, request_id, 0.0), Wait)
    assert order_of(busy, *waiting)[-3:] == ["important", "plain", "soon"]


def test_a_request_that_continues_a_broken_stream_goes_before_all(busy: Scheduler) -> None:
    for number in range(2):
        first_place(busy, replace(shape(1500), continues=True), f"c{number}")
    waiting = {
        "important": shape(1500, priority=-5),
        "broken": replace(shape(1500, ttft_s=60, priority=5), continues=True),
    }
    assert wait_for_turn(busy, **waiting)[-2:] == ["broken", "important"]


def test_a_flood_of_one_tenant_does_not_hold_up_another(busy: Scheduler) -> None:
    flood = {f"flood{number}": shape(1500, tenant="loud") for number in range(20)}
    order = wait_for_turn(busy, **flood, quiet=shape(1500, tenant="quiet"))
    assert order.index("quiet") <= 1


def test_two_tenants_share_evenly_whatever_each_has_waiting(busy: Scheduler) -> None:
    loud = {f"loud{number}": shape(1500, tenant="loud") for number in range(20)}
    quiet = {f"quiet{number}": shape(1500, tenant="quiet") for number in range(5)}
    order = wait_for_turn(busy, **loud, **quiet)
    assert sum(request_id.startswith("quiet") for request_id in order[:10]) == 5


# ----------------------------------------------------------------------------------------------- decode workers


def test_the_decode_worker_with_more_free_blocks_is_taken_then_the_one_with_the_smaller_batch() -> None:
    pools = scheduler("p0", "d0", "d1")
    pools.observe_load("d0", 5000, 10_000)
    assert first_place(pools, shape(100), "a") == Remote("p0", "d1", "remote")
    pools = scheduler("p0", "d0", "d1")
    assert [first_place(pools, shape(100), i) for i in "abc"] == [
        Remote("p0", "d0", "remote"),
        Remote("p0", "d1", "remote"),
        Remote("p0", "d0", "remote"),
    ]


def test_a_request_waits_until_its_prompt_and_expected_answer_have_room() -> None:
    # 70 blocks of 16 tokens; a prompt of 500 tokens and 500 of output take 63 of them.
    pools = scheduler("p0", facts("d0", num_blocks=70))
    assert isinstance(first_place(pools, shape(500, 500), "a"), Remote)
    assert first_place(pools, shape(500, 500), "b", 0.1) == Wait("decode_full")
    pools.complete("a", 0.6)
    assert pools.place(0.6) == [], "the first one still runs"
    pools.remove("a", 9.0, 500)
    assert isinstance(placed(pools.place(9.0))["b"], Remote)


def test_an_idle_worker_takes_what_would_never_fit_by_the_books() -> None:
    assert isinstance(first_place(scheduler("p0", facts("d0", num_blocks=10)), shape(500, 500)), Remote)


def test_blocks_that_are_taken_by_nobody_we_know_are_not_free() -> None:
    pools = scheduler("p0", "d0")
    first_place(pools, shape(100), "a")
    pools.observe_load("d0", 9_990, 10_000)
    assert first_place(pools, shape(500), "b") == Wait("decode_full")
    pools.observe_load("d0", 10, 10_000)
    assert isinstance(placed(pools.place(0.1))["b"], Remote)


def test_an_engine_gets_no_more_requests_than_it_runs_at_once() -> None:
    pools = scheduler("p0", facts("d0", max_num_seqs=1))
    first_place(pools, shape(100), "a")
    pools.complete("a", 0.1)
    assert first_place(pools, shape(100), "b", 0.2) == Wait("decode_full")


def test_short_prompts_do_not_wait_for_prefill_workers(busy: Scheduler) -> None:
    first_place(busy, shape(1500), "long")
    assert first_place(busy, shape(30), "short") == Local("d0", "short_prompt")


def test_long_answers_make_it_keep_more_room() -> None:
    pools = scheduler("p0", facts("d0", num_blocks=300))
    for number in range(10):
        pools.remove(str(number), 0.0, num_output_tokens=3000)
    assert isinstance(first_place(pools, shape(500, 4000), "a"), Remote)
    assert first_place(pools, shape(500, 4000), "b") == Wait("decode_full")
    assert isinstance(first_place(pools, shape(500, 100), "c"), Wait), "it does not overtake"


def test_small_requests_do_not_for_ever_take_the_room_that_a_large_one_waits_for() -> None:
    pools = scheduler("p0", facts("d0", num_blocks=512))
    for number in range(6):
        first_place(pools, shape(30, 600), f"small{number}")
    assert first_place(pools, shape(7000, 600), "large") == Wait("decode_full")
    assert isinstance(first_place(pools, shape(30, 600), "passes", 1.0), Local)
    assert first_place(pools, shape(30, 600), "waits", 6.0) == Wait("decode_full")
    for request_id in ("passes", *(f"small{number}" for number in range(6))):
        pools.remove(request_id, 7.0)
    assert placed(pools.place(7.0))["large"] == Remote("p0", "d0", "remote")


# ------------------------------------------------------------------------------------------ computing it locally


def test_a_prompt_that_fits_between_two_steps_is_computed_by_the_decode_worker_if_prefill_workers_are_busy() -> None:
    pools = scheduler("p0", "d0", "d1")
    fill(pools, "f0")
    assert first_place(pools, shape(100, itl_s=0.2), "a") == Local("d1", "prefill_busy")


def test_it_is_not_if_gaps_between_tokens_would_grow_beyond_their_target(busy: Scheduler) -> None:
    assert first_place(busy, shape(128, ttft_s=5), "a") == Wait("prefill_full")


def test_a_prompt_that_would_be_late_is_computed_by_the_decode_worker_in_chunks(busy: Scheduler) -> None:
    # 3 s of work before it, steps of 40 ms, so 40 ms of each step of 80 ms are for its 128 ms.
    assert first_place(busy, shape(128), "late") == Local("d0", "prefill_late")
    assert first_place(busy, shape(128), "another") == Wait("prefill_full"), "one at a time"


def test_it_is_not_if_chunks_would_not_bring_it_in_time_either(busy: Scheduler) -> None:
    assert first_place(busy, shape(700, ttft_s=1.0, priority=1), "a") == Wait("prefill_full")


def test_it_is_not_if_steps_are_too_near_their_target_for_chunks(busy: Scheduler) -> None:
    assert first_place(busy, shape(128, itl_s=0.06), "a") == Wait("prefill_full")


def test_it_is_not_if_that_takes_more_than_half_the_wait(busy: Scheduler) -> None:
    assert first_place(busy, shape(1600, ttft_s=4.0), "a") == Wait("prefill_full")


def test_a_prompt_that_would_be_late_does_not_wait_behind_those_that_wait_for_prefill_workers(busy: Scheduler) -> None:
    assert first_place(busy, shape(1500, ttft_s=9), "before it") == Wait("prefill_full")
    assert first_place(busy, shape(128), "late") == Local("d0", "prefill_late")


def test_one_such_prompt_at_a_time() -> None:
    pools = scheduler("p0", "d0")
    first_place(pools, shape(1500, itl_s=0.5), "long")
    assert first_place(pools, shape(100, itl_s=0.5), "a") == Local("d0", "prefill_busy")
    assert first_place(pools, shape(100, itl_s=0.5), "b") == Remote("p0", "d0", "remote")
    assert pools.complete("a", 0.1)
    assert first_place(pools, shape(100, itl_s=0.5), "c", 0.1) == Local("d0", "prefill_busy")


def test_a_probe_goes_through_both_pools_however_busy() -> None:
    pools = scheduler("p0", "d0")
    first_place(pools, shape(1500, itl_s=0.5), "long")
    assert first_place(pools, shape(100, itl_s=0.5, name="probe"), "a") == Remote("p0", "d0", "remote")


# ------------------------------------------------------------------------------------------------------ overload


def test_a_request_that_cannot_be_in_time_is_refused_at_once_and_told_when_to_come_back(busy: Scheduler) -> None:
    for number in range(3):
        first_place(busy, shape(1500), f"w{number}")
    refused = first_place(busy, shape(1500, name="chat", on_overload="reject"))
    assert isinstance(refused, Reject)
    assert (refused.status, refused.reason) == (503, "too_late")
    assert "class `chat` asks for 3 s" in refused.message
    assert refused.retry_after_s is not None
    assert refused.retry_after_s >= 1.0


def test_a_prompt_that_is_too_long_for_its_class_is_told_so() -> None:
    pools = scheduler("p0", "d0")
    assert isinstance(first_place(pools, shape(6000, on_overload="reject"), "first"), Remote), "who knows?"
    pools.complete("first", 6.0)
    for number in range(8):
        first_place(pools, shape(1000), str(number), 10.0 + 2.0 * number)
        pools.complete(str(number), 11.1 + 2.0 * number)
    refused = first_place(pools, shape(6000, on_overload="reject"), "second", 30.0)
    assert isinstance(refused, Reject)
    assert "even on an idle worker" in refused.message
    assert refused.retry_after_s is None


def test_a_request_that_cannot_be_in_time_goes_behind_all_that_can(busy: Scheduler) -> None:
    for number in range(3):
        first_place(busy, shape(1500), f"w{number}")
    demoted = placed(busy.place(0.0))
    busy.add("hopeless", shape(1500, on_overload="demote"), 0.0, 0.0)
    demoted = {d.request_id: d for d in busy.place(0.0)}
    assert demoted["hopeless"].demoted
    assert isinstance(first_place(busy, shape(1500, ttft_s=20.0), "patient", 0.0), Wait)
    assert order_of(busy, *"12345")[-2:] == ["patient", "hopeless"]


def test_on_an_idle_worker_even_the_demoted_go_at_once() -> None:
    assert first_place(scheduler("p0", "d0"), shape(6000, on_overload="demote")) == Remote("p0", "d0", "remote")


def test_the_policy_queue_changes_nothing_for_who_is_late(busy: Scheduler) -> None:
    for number in range(9):
        assert isinstance(first_place(busy, shape(1500), f"w{number}"), Wait)


def test_the_queue_has_a_bound() -> None:
    pools = scheduler("p0", "d0", policy=replace(POLICY, max_queued_requests=2))
    fill(pools, "f0", "f1")
    assert isinstance(first_place(pools, shape(1500), "a"), Wait)
    assert isinstance(first_place(pools, shape(1500), "b"), Wait)
    full = first_place(pools, shape(1500), "c")
    assert isinstance(full, Reject)
    assert (full.status, full.reason) == (429, "queue_full")
    assert full.retry_after_s is not None
    assert isinstance(first_place(pools, replace(shape(1500), continues=True), "broken"), Wait | Remote)


def test_a_full_queue_is_made_shorter_by_the_tenant_that_fills_it() -> None:
    pools = scheduler("p0", "d0", policy=replace(POLICY, max_queued_requests=3))
    fill(pools, "f0", "f1")
    for number in range(3):
        assert isinstance(first_place(pools, shape(1500, tenant="loud"), f"loud{number}"), Wait)
    pools.add("quiet", shape(1500, tenant="quiet"), 0.0, 0.0)
    decisions = placed(pools.place(0.0))
    assert isinstance(decisions["quiet"], Wait)
    assert isinstance(decisions["loud2"], Reject)


def test_a_newcomer_that_is_demoted_is_the_one_that_leaves_a_full_queue() -> None:
    pools = scheduler("p0", "d0", policy=replace(POLICY, max_queued_requests=1))
    fill(pools, "f0", "f1")
    assert isinstance(first_place(pools, shape(4000, ttft_s=3.5), "earlier"), Wait)
    refused = first_place(pools, shape(4000, ttft_s=4.0, on_overload="demote"), "demoted")
    assert isinstance(refused, Reject)
    assert refused.reason == "queue_full"


def test_a_request_that_is_refused_when_its_way_is_chosen_again_is_told_at_once() -> None:
    pools = scheduler("d0", policy=replace(POLICY, on_no_prefill="reject"), prefixes=Caches({"d0": {"h": 480}}))
    pools.observe_load("d0", 9_990, 10_000)
    pools.add("short", shape(10), 0.0, 0.0)
    pools.place(0.0)
    assert isinstance(first_place(pools, shape(500, prompt_hashes="h")), Reject)


def test_who_waits_too_long_is_taken_out(busy: Scheduler) -> None:
    first_place(busy, shape(1500), "a", 0.0)
    first_place(busy, shape(1500), "b", 5.0)
    assert busy.expire(29.0, 30.0) == []
    assert busy.expire(30.0, 30.0) == ["a"]
    assert busy.expire(35.0, 30.0) == ["b"]
    assert busy.num_waiting == 0


def test_workers_of_the_other_kind_that_come_and_go_prolong_no_wait_for_somebody() -> None:
    pools = scheduler("p0", policy=replace(POLICY, on_no_prefill="queue"))
    assert isinstance(first_place(pools, shape(1500)), Wait)
    for second in range(1, 10):
        pools.observe_pools([facts("p0", epoch=str(second))], frozenset(), float(second))
    assert pools.expire(10.0, 30.0, 10.0) == ["r"]


# -------------------------------------------------------------------------------------------- workers come and go


def test_a_worker_that_comes_takes_waiting_requests(busy: Scheduler) -> None:
    first_place(busy, shape(1500), "a")
    busy.observe_pools([facts("p0"), facts("p1"), facts("d0")], frozenset(), 0.1)
    assert placed(busy.place(0.1)) == {"a": Remote("p1", "d0", "remote")}


def test_what_waits_for_a_worker_that_leaves_goes_another_way(busy: Scheduler) -> None:
    first_place(busy, shape(1500), "a")
    busy.observe_pools([facts("d0")], frozenset(), 0.1)
    assert placed(busy.place(0.1)) == {"a": Local("d0", "no_prefill_worker")}


def test_a_worker_whose_drain_is_called_off_still_has_what_it_had() -> None:
    pools = scheduler("p0", "d0", "d1")
    for number in range(2):
        assert isinstance(first_place(pools, shape(), str(number)), Remote)
    jobs, carried = dict(pools.books.pools.prefill["p0"].jobs), pools.books.pools.decode["d0"].reserved
    assert carried > 0
    pools.observe_pools([facts("d1")], frozenset(), 1.0)
    pools.remove("1", 1.1)
    pools.observe_pools([facts("p0"), facts("d0"), facts("d1")], frozenset(), 1.2)
    assert pools.books.pools.prefill["p0"].jobs == {"0": jobs["0"]}
    assert pools.books.pools.decode["d0"].reserved == carried
    pools.remove("0", 1.3)
    assert pools.books.pools.decode["d0"].reserved == 0


def test_a_new_life_owes_nothing_of_the_old_one_and_is_as_fast(busy: Scheduler) -> None:
    busy.complete("f0", 4.0)
    busy.complete("f1", 8.0)
    speed = busy.books.pools.prefill["p0"].costs.token_s
    assert speed > 1 / 1000
    fill(busy, "f2", "f3", now_s=8.0)
    busy.observe_pools([facts("p0", epoch="2"), facts("d0")], frozenset(), 8.1)
    reborn = busy.books.pools.prefill["p0"]
    assert reborn.jobs == {}
    assert reborn.costs.token_s == speed
    busy.remove("f2", 9.0)
    busy.remove("f3", 9.0)
    assert reborn.costs.token_s == speed


def test_a_worker_that_has_done_nothing_yet_is_believed_to_be_as_fast_as_the_others() -> None:
    pools = scheduler("p0", "d0")
    for number in range(20):
        first_place(pools, shape(1000), str(number), float(number))
        pools.complete(str(number), number + 0.05)
        pools.remove(str(number), number + 0.1)
    pools.observe_pools([facts("p0"), facts("p1"), facts("d0")], frozenset(), 30.0)
    went = [first_place(pools, shape(1000), f"after{number}", 30.0) for number in range(2)]
    assert {getattr(placement, "prefill", "") for placement in went} == {"p0", "p1"}


def test_siblings_are_charged_where_they_run() -> None:
    pools = scheduler("p0", "d0")
    first_place(pools, shape(1500), "leader")
    taken = pools.books.pools.decode["d0"].reserved
    pools.follow("sibling", shape(1500), "d0", 0.1)
    assert pools.books.pools.decode["d0"].reserved == taken + -(-17 // 16)
    pools.follow("scored", shape(1500, max_tokens=1), "p0", 0.1)
    assert len(pools.books.pools.prefill["p0"].jobs) == 2
    pools.follow("lost", shape(1500), "d7", 0.1)
    for request_id in ("leader", "sibling", "scored", "lost"):
        pools.remove(request_id, 0.2)
    assert pools.books.pools.decode["d0"].reserved == 0
    assert pools.books.pools.prefill["p0"].jobs == {}


def test_siblings_wait_where_there_is_no_room_for_their_answers() -> None:
    pools = scheduler(facts("p0", max_num_seqs=8), facts("d0", num_blocks=80, max_num_seqs=3))
    pools.follow("a", shape(500, max_tokens=1600), "d0", 0.0)
    assert pools.follow("b", shape(500, max_tokens=1600), "d0", 0.1)
    assert not pools.follow("c", shape(500, max_tokens=16_000), "d0", 0.2), "no blocks"
    assert pools.follow("d", shape(500), "d0", 0.3)
    assert not pools.follow("e", shape(500), "d0", 0.4), "the engine runs no more at once"
    pools.remove("a", 0.5)
    assert pools.follow("e", shape(500), "d0", 0.6)
    for number in range(8):
        pools.follow(f"scored{number}", shape(1500, max_tokens=1), "p0", 0.1)
    assert len(pools.books.pools.prefill["p0"].jobs) == 8
    assert not pools.follow("scored8", shape(1500, max_tokens=1), "p0", 0.1)


def test_siblings_ask_a_worker_that_drains_too() -> None:
    pools = scheduler("p0", facts("d0", max_num_seqs=1), "d1")
    pools.follow("a", shape(500), "d0", 0.0)
    pools.observe_pools([facts("p0"), facts("d1")], frozenset(), 0.1)
    assert not pools.follow("b", shape(500), "d0", 0.2)
    pools.remove("a", 0.3)
    assert pools.follow("b", shape(500), "d0", 0.4)


@pytest.mark.parametrize("policy", ["reject", "demote"])
def test_a_sibling_of_which_the_client_has_an_answer_is_not_turned_away(busy: Scheduler, policy: Any) -> None:
    late = shape(1000, ttft_s=0.001, on_overload=policy, priority=5)
    assert isinstance(first_place(busy, replace(late, accepted=True), "heir"), Wait)
    assert busy.place(100.0) == []
    assert not busy._waiting["heir"].entry.demoted


def test_adding_twice_is_a_mistake(busy: Scheduler) -> None:
    with pytest.raises(ValueError, match="added twice"):
        busy.add("f0", shape(1), 0.0, 0.0)


def test_one_token_needs_no_decode_worker_with_room() -> None:
    pools = scheduler("p0", facts("d0", num_blocks=1))
    first_place(pools, shape(100), "a")
    assert first_place(pools, shape(500, max_tokens=1), "b") == PrefillOnly("p0", "single_token")


def test_waiting_for_room_and_waiting_for_somebody_to_come_have_limits_of_their_own() -> None:
    pools = scheduler("p0", "d0")
    for name in ("a", "b", "c", "d"):
        pools.add(name, shape(3000), 0.0, 0.0)
    pools.place(0.0)
    assert pools.num_waiting == 2
    assert pools.expire(200.0, 300.0, 30.0) == []
    pools.observe_pools([], frozenset(), 200.0, frozenset({"decode"}))
    assert pools.expire(229.0, 300.0, 30.0) == []
    assert sorted(pools.expire(230.0, 300.0, 30.0)) == ["c", "d"]
