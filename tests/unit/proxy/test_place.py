"""Placement: the same arguments always give the same workers, and the reason is one that is counted."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.scheduling.place import REASONS, Local, Policy, PrefillOnly, Reject, Remote, Wait, place
from proxy.scheduling.view import PoolView, RequestShape, WorkerView

POLICY = Policy(remote_prefill_min_tokens=64, on_no_prefill="local")
LONG = RequestShape(num_prompt_tokens=500, max_tokens=16, first_token_mode=True)


def worker(worker_id: str, **changes: Any) -> WorkerView:
    role: Any = "prefill" if worker_id.startswith("p") else "decode"
    fresh = WorkerView(
        worker_id=worker_id,
        role=role,
        alive=True,
        fingerprint="f",
        max_model_len=2048,
        queued_tokens=0,
        num_requests=0,
        blocks_free=100,
    )
    return replace(fresh, **changes)


def pool(*workers: WorkerView) -> PoolView:
    return PoolView(workers)


def test_a_long_prompt_is_prefilled_remotely() -> None:
    assert place(LONG, pool(worker("p0"), worker("d0")), POLICY) == Remote("p0", "d0", "remote")


def test_a_short_prompt_stays_on_the_decode_worker() -> None:
    short = replace(LONG, num_prompt_tokens=63)
    assert place(short, pool(worker("p0"), worker("d0")), POLICY) == Local("d0", "short_prompt")
    assert isinstance(place(replace(LONG, num_prompt_tokens=64), pool(worker("p0"), worker("d0")), POLICY), Remote)


def test_one_token_is_the_prefill_workers_business_alone() -> None:
    one = replace(LONG, max_tokens=1)
    assert place(one, pool(worker("p0"), worker("d0")), POLICY) == PrefillOnly("p0", "single_token")


def test_a_prompt_that_leaves_room_for_one_token_is_not_handed_over() -> None:
    view = pool(worker("p0"), worker("d0"))
    assert place(replace(LONG, num_prompt_tokens=2047), view, POLICY) == PrefillOnly("p0", "single_token")
    assert isinstance(place(replace(LONG, num_prompt_tokens=2046), view, POLICY), Remote)


def test_the_prefill_worker_with_the_shortest_queue_is_taken() -> None:
    view = pool(worker("p0", queued_tokens=900), worker("p1", queued_tokens=100), worker("d0"))
    assert place(LONG, view, POLICY) == Remote("p1", "d0", "remote")


def test_the_decode_worker_with_most_free_blocks_is_taken_then_the_one_with_the_smaller_batch() -> None:
    roomy = pool(worker("p0"), worker("d0", blocks_free=10), worker("d1", blocks_free=50))
    equal = pool(worker("p0"), worker("d0", num_requests=3), worker("d1", num_requests=1))
    assert place(LONG, roomy, POLICY) == Remote("p0", "d1", "remote")
    assert place(LONG, equal, POLICY) == Remote("p0", "d1", "remote")


def test_the_worker_under_which_a_request_was_lost_is_taken_only_if_there_is_no_other() -> None:
    view = pool(worker("p0"), worker("p1", queued_tokens=900), worker("d0"), worker("d1", blocks_free=1))
    assert place(replace(LONG, avoid="d0"), view, POLICY) == Remote("p0", "d1", "remote")
    assert place(replace(LONG, avoid="p0"), view, POLICY) == Remote("p1", "d0", "remote")
    assert place(replace(LONG, avoid="d0"), pool(worker("p0"), worker("d0")), POLICY) == Remote("p0", "d0", "remote")


def test_only_workers_with_the_same_layout_are_paired() -> None:
    view = pool(
        worker("p0", fingerprint="other"),
        worker("p1", queued_tokens=999),
        worker("d0", blocks_free=1),
        worker("d1", fingerprint="third", blocks_free=99),
    )
    assert place(LONG, view, POLICY) == Remote("p1", "d0", "remote")


def test_workers_with_layouts_that_fit_are_paired() -> None:
    """Fitting is no equivalence: p0 fits d0 and d1, which do not fit each other."""
    workers = (
        worker("p0"),
        worker("p1", fingerprint="other"),
        worker("d0", fingerprint="small blocks", blocks_free=5),
        worker("d1", fingerprint="more ranks", blocks_free=9),
        worker("d2", fingerprint="alien", blocks_free=99),
    )
    view = PoolView(workers, frozenset({("f", "small blocks"), ("f", "more ranks"), ("other", "small blocks")}))
    assert place(LONG, view, POLICY) == Remote("p0", "d1", "remote")
    busy = PoolView((replace(workers[0], queued_tokens=999), *workers[1:]), view.compatible)
    assert place(LONG, busy, POLICY) == Remote("p1", "d0", "remote")


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("local", Local("d0", "no_prefill_worker")), ("queue", Wait("no_prefill_worker"))],
)
def test_without_prefill_workers_the_policy_decides(policy: Any, expected: object) -> None:
    view = pool(worker("p0", alive=False), worker("d0"))
    assert place(LONG, view, replace(POLICY, on_no_prefill=policy)) == expected


def test_a_rejection_names_its_cause() -> None:
    view = pool(worker("d0"))
    placement = place(LONG, view, replace(POLICY, on_no_prefill="reject"))
    assert isinstance(placement, Reject)
    assert (placement.status, placement.reason) == (503, "no_prefill_worker")
    assert "on_no_prefill" in placement.message


def test_without_a_compatible_pair_the_policy_decides_under_its_own_reason() -> None:
    view = pool(worker("p0", fingerprint="other"), worker("d0"))
    assert place(LONG, view, POLICY) == Local("d0", "no_compatible_pair")


@pytest.mark.parametrize(("policy", "kind"), [("local", Reject), ("queue", Wait), ("reject", Reject)])
def test_without_decode_workers_nothing_can_be_placed(policy: Any, kind: type) -> None:
    placement = place(LONG, pool(worker("p0")), replace(POLICY, on_no_prefill=policy))
    assert isinstance(placement, kind)
    assert placement.reason == "no_decode_worker"


def test_what_cannot_be_handed_over_is_local_however_long() -> None:
    image = replace(LONG, local_because="multimodal input")
    assert place(image, pool(worker("p0"), worker("d0")), POLICY) == Local("d0", "not_transferable")


def test_in_exact_mode_a_prompt_of_one_token_has_nothing_to_move() -> None:
    tiny = RequestShape(num_prompt_tokens=1, max_tokens=16, first_token_mode=False)
    view = pool(worker("p0"), worker("d0"))
    always = replace(POLICY, remote_prefill_min_tokens=1)
    assert place(tiny, view, always) == Local("d0", "nothing_to_move")
    assert isinstance(place(replace(tiny, first_token_mode=True), view, always), Remote)


def test_workers_that_cannot_hold_the_prompt_are_not_asked() -> None:
    view = pool(worker("p0", max_model_len=400), worker("p1", queued_tokens=999), worker("d0"))
    assert place(LONG, view, POLICY) == Remote("p1", "d0", "remote")
    too_long = place(replace(LONG, num_prompt_tokens=5000), view, POLICY)
    assert isinstance(too_long, Reject)
    assert (too_long.status, too_long.reason) == (400, "too_long")


WORKERS = st.builds(
    worker,
    st.sampled_from(["p0", "p1", "d0", "d1"]),
    alive=st.booleans(),
    fingerprint=st.sampled_from(["f", "g"]),
    queued_tokens=st.integers(0, 5),
    num_requests=st.integers(0, 3),
    blocks_free=st.integers(0, 3),
    max_model_len=st.sampled_from([100, 1000]),
)
SHAPES = st.builds(
    RequestShape,
    num_prompt_tokens=st.integers(0, 1100),
    max_tokens=st.integers(1, 3),
    first_token_mode=st.booleans(),
    wants_prompt_scores=st.booleans(),
    local_because=st.sampled_from(["", "pooling"]),
)
POLICIES = st.builds(Policy, st.integers(1, 200), st.sampled_from(["local", "queue", "reject"]))


@given(workers=st.lists(WORKERS, max_size=5, unique_by=lambda w: w.worker_id), shape=SHAPES, policy=POLICIES)
def test_every_placement_is_possible_and_counted(
    workers: list[WorkerView], shape: RequestShape, policy: Policy
) -> None:
    view = PoolView(tuple(workers))
    placement = place(shape, view, policy)
    assert placement == place(shape, view, policy)
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
        assert by_id[worker_id].alive
        assert by_id[worker_id].role == role
        assert by_id[worker_id].max_model_len > shape.num_prompt_tokens
