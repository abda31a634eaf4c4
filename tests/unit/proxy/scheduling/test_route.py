"""Which way a request goes, whoever is busy: the same arguments always give the same answer, under a counted reason."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.scheduling.capacity.costs import Work
from proxy.scheduling.capacity.workers import Job
from proxy.scheduling.place import REASONS, Local, Policy, PrefillOnly, Reject, Remote, Wait
from proxy.scheduling.scheduler import Scheduler
from proxy.scheduling.view import RequestShape, WorkerFacts
from tests.unit.proxy.scheduling.situations import POLICY, Caches, facts, first_place, scheduler, shape

LONG = shape(500)


def test_a_long_prompt_is_prefilled_remotely() -> None:
    assert first_place(scheduler("p0", "d0"), LONG) == Remote("p0", "d0", "remote")


def test_a_short_prompt_stays_on_the_decode_worker() -> None:
    assert first_place(scheduler("p0", "d0"), shape(63)) == Local("d0", "short_prompt")
    assert isinstance(first_place(scheduler("p0", "d0"), shape(64)), Remote)


def test_a_prompt_that_a_decode_worker_has_but_for_a_few_tokens_goes_there() -> None:
    known = Caches({"d1": {(1,): 450}})
    prompt = shape(500, prompt_hashes=(1,))
    assert first_place(scheduler("p0", "d0", "d1", prefixes=known), prompt) == Local("d1", "cached_prefix")
    known = Caches({"d1": {(1,): 430}})
    assert isinstance(first_place(scheduler("p0", "d0", "d1", prefixes=known), prompt), Remote)


def test_a_full_worker_is_not_followed_for_its_cache() -> None:
    busy = scheduler("p0", "d0", "d1", prefixes=Caches({"d1": {(1,): 450}}))
    busy.observe_load("d1", 5000, 10_000)
    assert first_place(busy, shape(500, prompt_hashes=(1,))) == Remote("p0", "d0", "remote")


def test_one_token_is_the_prefill_workers_business_alone() -> None:
    assert first_place(scheduler("p0", "d0"), shape(500, max_tokens=1)) == PrefillOnly("p0", "single_token")


def test_a_prompt_that_leaves_room_for_one_token_is_not_handed_over() -> None:
    assert first_place(scheduler("p0", "d0"), shape(8191)) == PrefillOnly("p0", "single_token")
    assert isinstance(first_place(scheduler("p0", "d0"), shape(8190)), Remote)


def test_only_workers_with_the_same_layout_are_paired() -> None:
    pools = scheduler(facts("p0", fingerprint="other"), "p1", "d0", facts("d1", fingerprint="third"))
    assert first_place(pools, LONG) == Remote("p1", "d0", "remote")


def test_workers_with_layouts_that_fit_are_paired() -> None:
    """Fitting is no equivalence: p0 fits d0 and d1, which do not fit each other."""
    workers = (
        facts("p0"),
        facts("p1", fingerprint="other"),
        facts("d0", fingerprint="small blocks", num_blocks=500),
        facts("d1", fingerprint="more ranks"),
        facts("d2", fingerprint="alien"),
    )
    pools = Scheduler(POLICY)
    compatible = frozenset({("f", "small blocks"), ("f", "more ranks"), ("other", "small blocks")})
    pools.observe_pools(workers, compatible, 0.0)
    pools.observe_load("d0", 200, 500)
    assert first_place(pools, LONG, "a") == Remote("p0", "d1", "remote")
    assert first_place(pools, LONG, "b") == Remote("p1", "d0", "remote")


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("local", Local("d0", "no_prefill_worker")), ("queue", Wait("no_prefill_worker"))],
)
def test_without_prefill_workers_the_policy_decides(policy: Any, expected: object) -> None:
    assert first_place(scheduler("d0", policy=replace(POLICY, on_no_prefill=policy)), LONG) == expected


def test_a_rejection_names_its_cause() -> None:
    placement = first_place(scheduler("d0", policy=replace(POLICY, on_no_prefill="reject")), LONG)
    assert isinstance(placement, Reject)
    assert (placement.status, placement.reason) == (503, "no_prefill_worker")
    assert "on_no_prefill" in placement.message


def test_without_a_compatible_pair_the_policy_decides_under_its_own_reason() -> None:
    pools = scheduler(facts("p0", fingerprint="other"), "d0")
    assert first_place(pools, LONG) == Local("d0", "no_compatible_pair")


@pytest.mark.parametrize(("policy", "kind"), [("local", Reject), ("queue", Wait), ("reject", Reject)])
def test_without_decode_workers_nothing_can_be_placed(policy: Any, kind: type) -> None:
    placement = first_place(scheduler("p0", policy=replace(POLICY, on_no_prefill=policy)), LONG)
    assert isinstance(placement, kind)
    assert placement.reason == "no_decode_worker"


def test_a_decode_worker_that_comes_back_is_waited_for() -> None:
    pools = Scheduler(POLICY)
    pools.observe_pools([facts("p0")], frozenset(), 0.0, frozenset({"decode"}))
    assert first_place(pools, LONG) == Wait("no_decode_worker")


def test_what_cannot_be_handed_over_is_local_however_long() -> None:
    image = replace(LONG, local_because="multimodal input")
    assert first_place(scheduler("p0", "d0"), image) == Local("d0", "not_transferable")


def test_in_exact_mode_a_prompt_of_one_token_has_nothing_to_move() -> None:
    always = replace(POLICY, remote_prefill_min_tokens=1)
    tiny = shape(1, first_token_mode=False)
    assert first_place(scheduler("p0", "d0", policy=always), tiny) == Local("d0", "nothing_to_move")
    assert isinstance(first_place(scheduler("p0", "d0", policy=always), replace(tiny, first_token_mode=True)), Remote)


def test_workers_that_cannot_hold_the_prompt_are_not_asked() -> None:
    pools = scheduler(facts("p0", max_model_len=400), "p1", "d0")
    assert first_place(pools, LONG) == Remote("p1", "d0", "remote")
    too_long = first_place(pools, shape(9000), "long")
    assert isinstance(too_long, Reject)
    assert (too_long.status, too_long.reason) == (400, "too_long")


def test_the_worker_under_which_a_request_was_lost_is_avoided_unless_it_is_the_only_one() -> None:
    assert first_place(scheduler("p0", "p1", "d0"), replace(LONG, avoid="p0")) == Remote("p1", "d0", "remote")
    assert first_place(scheduler("p0", "d0", "d1"), replace(LONG, avoid="d0")) == Remote("p0", "d1", "remote")
    assert first_place(scheduler("p0", "d0"), replace(LONG, avoid="p0")) == Remote("p0", "d0", "remote")


def test_it_takes_the_request_again_if_the_others_are_full() -> None:
    pools = scheduler("p0", facts("d0", num_blocks=100), facts("d1", num_blocks=100))
    assert first_place(pools, replace(LONG, avoid="d0", max_tokens=1000), "first") == Remote("p0", "d1", "remote")
    assert first_place(pools, replace(LONG, avoid="d0", max_tokens=1000), "next") == Remote("p0", "d0", "remote")
    pools = scheduler("p0", facts("p1", max_num_batched_tokens=64), "d0")
    for number in range(2):
        assert first_place(pools, replace(LONG, avoid="p0"), f"ahead{number}") == Remote("p1", "d0", "remote")
    assert first_place(pools, replace(LONG, avoid="p0")) == Remote("p0", "d0", "remote")


@pytest.mark.parametrize("other", [{"max_model_len": 100}, {"fingerprint": "another"}])
def test_it_is_not_avoided_either_if_the_others_will_not_do(other: dict[str, Any]) -> None:
    pools = scheduler("p0", facts("p1", **other), "d0", facts("d1", **(other if "max_model_len" in other else {})))
    assert first_place(pools, replace(LONG, avoid="p0")) == Remote("p0", "d0", "remote")
    pools = scheduler("p0", "d0", facts("d1", **other))
    assert first_place(pools, replace(LONG, avoid="d0")) == Remote("p0", "d0", "remote")


def test_prefill_workers_that_fit_no_decode_worker_do_not_hide_the_one_that_does() -> None:
    strangers = [facts(f"p{number}", fingerprint="new") for number in range(9)]
    assert first_place(scheduler(*strangers, "p9", "d0"), LONG) == Remote("p9", "d0", "remote")


def test_decode_workers_that_know_a_prompt_do_not_hide_the_prefill_worker_that_does() -> None:
    decoders = [f"d{number}" for number in range(9)]
    knowing = Caches({name: {"h": 480} for name in (*decoders, "p9")})
    pools = scheduler(*(f"p{number}" for number in range(10)), *decoders, prefixes=knowing)
    assert first_place(pools, shape(2000, prompt_hashes="h")) == Remote("p9", "d0", "remote")


def busy_with(worker_id: str, *prompts: int, among: int, minute_s: float = 0.0) -> Scheduler:
    """Prompts at one worker that has cached 2,000 tokens of `h`; all `among` have worked `minute_s` each before."""
    names = [f"p{number}" for number in range(among)]
    pools = scheduler(*names, "d0", prefixes=Caches({worker_id: {"h": 2000}}))
    for worker in pools.books.pools.prefill.values():
        worker.recent.add(minute_s, 0.0)
        pools.books.pools.recent.add(minute_s, 0.0)
    for number, tokens in enumerate(prompts):
        pools.books.pools.prefill[worker_id].begin(str(number), Job(((1, 0), 0.0), Work(1, tokens), tokens / 1000), 0.0)
    return pools


@pytest.mark.parametrize(("minute_s", "chosen"), [(0.0, "p0"), (50.0, "p1")])
def test_computing_a_prompt_again_costs_those_who_wait_behind_it_as_well(minute_s: float, chosen: str) -> None:
    """Waiting takes a little longer than computing; that does not pay where everybody has work."""
    pools = busy_with("p1", 2400, among=2, minute_s=minute_s)
    assert first_place(pools, shape(2100, prompt_hashes="h")) == Remote(chosen, "d0", "remote")


def test_who_finds_too_much_at_a_worker_to_go_elsewhere_is_not_kept_waiting_for_room_there() -> None:
    request = shape(2100, prompt_hashes="h")
    assert first_place(busy_with("p1", 600, 600, among=2), request) == Remote("p1", "d0", "remote")
    others = busy_with("p1", 1100, 1100, among=2)
    assert first_place(others, request) == Remote("p0", "d0", "remote"), "an idle one is as good, so order stays open"


WORKERS = st.builds(
    facts,
    st.sampled_from(["p0", "p1", "d0", "d1"]),
    fingerprint=st.sampled_from(["f", "g"]),
    max_model_len=st.sampled_from([100, 1000]),
    num_blocks=st.integers(0, 40),
    max_num_seqs=st.integers(1, 3),
)
SHAPES = st.builds(
    shape,
    st.integers(0, 1100),
    st.integers(1, 3),
    first_token_mode=st.booleans(),
    wants_prompt_scores=st.booleans(),
    local_because=st.sampled_from(["", "pooling"]),
    avoid=st.sampled_from(["", "p0", "d1"]),
)
POLICIES = st.builds(Policy, st.integers(1, 200), st.sampled_from(["local", "queue", "reject"]))


@given(workers=st.lists(WORKERS, max_size=4, unique_by=lambda w: w.worker_id), request=SHAPES, policy=POLICIES)
def test_every_placement_is_possible_and_counted(
    workers: list[WorkerFacts], request: RequestShape, policy: Policy
) -> None:
    placement = first_place(scheduler(*workers, policy=policy), request)
    assert placement == first_place(scheduler(*workers, policy=policy), request)
    assert placement.reason in REASONS
    by_id = {w.worker_id: w for w in workers}
    match placement:
        case Remote(prefill, decode, _):
            assert by_id[prefill].fingerprint == by_id[decode].fingerprint
            chosen = {prefill: "prefill", decode: "decode"}
        case PrefillOnly(prefill, _):
            chosen = {prefill: "prefill"}
        case Local(decode, _):
            chosen = {decode: "decode"}
        case _:
            chosen = {}
    for worker_id, role in chosen.items():
        assert by_id[worker_id].role == role
        assert by_id[worker_id].max_model_len > request.num_prompt_tokens
