"""Who is in the cluster, who is alive, and whose messages count."""

from typing import Any

import msgspec

from cluster.messages import LEAVE, PROTOCOL_VERSION, EngineFacts, RankAddress, WorkerHello, WorkerLoad
from cluster.status import RefusedPair
from proxy.workers.roster import Roster


def hello(worker_id: str = "prefill-0", **changes: Any) -> WorkerHello:
    facts = EngineFacts("m", 2048, 16, 100, 8, 512, 1, "bfloat16", ["generate"])
    fresh = WorkerHello(
        protocol=PROTOCOL_VERSION,
        worker_id=worker_id,
        role=worker_id.split("-")[0],
        epoch=f"{worker_id}-life-1",
        proxies_lost=0,
        pid=1,
        hostname="here",
        engine=facts,
        ranks=[RankAddress(0, "ipc://x", "e")],
        fingerprint="f",
        layout_fields={"dtype": "bfloat16"},
    )
    return msgspec.structs.replace(fresh, **changes)


def load(worker_id: str, epoch: str, blocks_free: int = 90) -> WorkerLoad:
    return WorkerLoad(worker_id, epoch, 0, 0, 100, blocks_free, 10, 0, 0, 0, {}, {}, {}, 0, {})


def roster(*worker_ids: str) -> Roster:
    fresh = Roster(models=frozenset({"m"}), dead_after_s=5.0, expected=("prefill-0", "decode-0"))
    for index, worker_id in enumerate(worker_ids):
        fresh.admit(bytes([index]), hello(worker_id), now_s=0.0)
    return fresh


def test_a_worker_that_fits_joins() -> None:
    admission = roster().admit(b"a", hello(), now_s=0.0)
    assert admission.worker is not None
    assert admission.joined
    assert admission.worker.index == 0


def test_a_worker_that_does_not_fit_hears_why() -> None:
    known = roster("prefill-0")
    protocol = known.admit(b"b", hello("decode-0", protocol=99), 0.0)
    role = known.admit(b"b", hello("decode-0", role="router"), 0.0)
    model = known.admit(b"b", hello("decode-0", engine=msgspec.structs.replace(hello().engine, model="other")), 0.0)
    assert "protocol 99" in protocol.refused
    assert "'router'" in role.refused
    assert "serves the model other, this cluster serves m" in model.refused
    assert [w.worker_id for w in known.alive()] == ["prefill-0"]


def test_a_new_life_replaces_the_old_one_and_keeps_its_number() -> None:
    known = roster("prefill-0", "decode-0")
    again = known.admit(b"new", hello("decode-0", epoch="life-2"), 1.0)
    assert again.lost is not None
    assert again.lost.kind == "restarted"
    assert again.worker is not None
    assert again.worker.index == 1
    assert known.heard(b"\x01", None, "decode-0-life-1", 1.0) is None, "the old life is not heard any more"
    assert known.heard(b"new", "decode-0", "decode-0-life-1", 1.0) is None


def test_a_worker_that_lost_sight_of_the_proxy_has_dropped_its_requests() -> None:
    known = roster("prefill-0")
    again = known.admit(b"other-connection", hello(proxies_lost=1), 1.0)
    assert again.lost is not None
    assert again.lost.kind == "rejoined"
    assert not again.joined
    assert known.heard(b"other-connection", None, None, 1.0) is not None
    repeated = known.admit(b"other-connection", hello(proxies_lost=1), 2.0)
    assert repeated.lost is None, "it is told once"


def test_a_hello_that_is_only_repeated_loses_nothing() -> None:
    """A worker says it every second until its welcome comes, and a proxy that starts is slow."""
    known = roster("prefill-0")
    again = known.admit(b"\x00", hello(), 1.0)
    assert again.worker is not None
    assert again.lost is None
    assert not again.joined


def test_a_worker_speaks_for_nobody_else() -> None:
    known = roster("prefill-0", "decode-0")
    assert known.heard(b"\x00", "decode-0", "prefill-0-life-1", 1.0) is None
    assert known.heard(b"\x00", "prefill-0", "prefill-0-life-1", 1.0) is not None


def test_silence_is_death_until_it_is_heard_again() -> None:
    known = roster("prefill-0", "decode-0")
    known.heard(b"\x00", None, None, now_s=4.0)
    assert [loss.worker_id for loss in known.silent(now_s=6.0)] == ["decode-0"]
    assert known.silent(now_s=6.0) == [], "a loss is told once"
    back = known.heard(b"\x01", None, None, now_s=7.0)
    assert back is not None
    assert [w.worker_id for w in known.alive()] == ["prefill-0"], "a report is awaited"
    assert known.report(back, load("decode-0", "decode-0-life-1"))
    assert [w.worker_id for w in known.alive()] == ["prefill-0", "decode-0"]
    assert "decode-0" not in known.causes


def test_a_proxy_that_stood_still_does_not_blame_the_workers() -> None:
    known = roster("prefill-0")
    known.forgive(late_s=10.0)
    assert known.silent(now_s=12.0) == []


def test_a_life_that_left_does_not_come_back() -> None:
    known = roster("prefill-0")
    loss = known.lose("prefill-0", "left", "it left")
    assert loss is not None
    assert known.heard(b"\x00", None, "prefill-0-life-1", 1.0) is None
    assert "already left" in known.admit(b"\x00", hello(), 1.0).refused
    assert known.admit(b"\x00", hello(epoch="life-2"), 1.0).joined


def drained_hello(goal: str, number: int = 1, **changes: Any) -> WorkerHello:
    return hello("decode-0", drains_to=goal, drain=number, **changes)


def test_a_worker_that_drains_is_alive_and_takes_no_requests() -> None:
    known = roster("prefill-0", "decode-0")
    admission = known.admit(b"\x01", drained_hello(LEAVE), 1.0)
    assert admission.changed
    assert not admission.joined
    assert [w.worker_id for w in known.alive("decode")] == ["decode-0"]
    assert known.taking_requests("decode") == []
    assert [w.worker_id for w in known.draining()] == ["decode-0"]
    assert [w.worker_id for w in known.facts()] == ["prefill-0"]
    assert known.awaited() == {"decode"}
    again = known.admit(b"\x01", drained_hello(LEAVE), 2.0)
    assert not again.changed


def test_from_the_order_on_it_gets_nothing_new_and_its_hello_is_the_answer() -> None:
    known = roster("decode-0")
    assert known.order("decode-0", "prefill") is not None
    assert known.taking_requests() == []
    known.admit(b"\x00", hello("decode-0"), 1.0)
    assert known.workers["decode-0"].ordered == "prefill", "an earlier hello is no answer"
    known.admit(b"\x00", drained_hello("prefill"), 1.0)
    assert known.workers["decode-0"].ordered == ""
    changed = known.admit(b"\x00", drained_hello("", role="prefill"), 2.0)
    assert changed.joined
    assert changed.lost is None
    assert [w.worker_id for w in known.taking_requests("prefill")] == ["decode-0"]


def test_a_role_taken_with_requests_left_over_loses_them() -> None:
    known = roster("decode-0")
    known.admit(b"\x00", drained_hello("prefill"), 1.0)
    changed = known.admit(b"\x00", drained_hello("", role="prefill", proxies_lost=1), 2.0)
    assert changed.joined
    assert changed.lost is not None
    assert "no more time to drain as a decode worker" in changed.lost.cause


def test_orders_for_the_dead_and_for_what_is_so_already_change_nothing() -> None:
    known = roster("decode-0")
    assert known.order("decode-7", LEAVE) is None
    assert known.order("decode-0", "decode") is not None
    assert known.workers["decode-0"].takes_requests
    known.lose("decode-0", "silent", "it was silent")
    assert known.order("decode-0", LEAVE) is None


def test_who_has_another_role_is_compared_with_its_new_partners() -> None:
    known = roster("prefill-0", "decode-0")
    known.admit(b"\x02", hello("prefill-1", fingerprint="g", layout_fields={"dtype": "float16"}), 0.0)
    known.admit(b"\x02", hello("prefill-1", fingerprint="g", layout_fields={"dtype": "float16"}, role="decode"), 1.0)
    assert [(pair.prefill, pair.decode) for pair in known.refused_pairs()] == [("prefill-0", "prefill-1")]


def test_a_decode_worker_is_worth_waiting_for_if_it_left_on_request_or_is_started_again() -> None:
    known = roster("decode-0")
    known.lose("decode-0", "exited", "killed")
    assert known.awaited() == frozenset()
    known.restarts = True
    assert known.awaited() == {"decode"}
    known.expect("decode-0", returns=False)
    assert known.awaited() == frozenset()
    known.admit(b"\x00", hello("decode-0", epoch="life-2"), 1.0)
    known.lose("decode-0", "silent", "it was silent")
    assert known.awaited() == frozenset(), "its process may be there for ever"
    known.lose("decode-0", "exited", "killed")
    assert known.awaited() == {"decode"}
    assert known.lose("decode-0", "drained", "it left") is None, "it was lost before"


def test_why_a_worker_is_dead_is_remembered_even_if_it_never_came() -> None:
    known = roster()
    assert known.lose("decode-0", "exited", "no memory") is None
    assert known.causes == {"decode-0": "no memory"}


def test_a_load_report_over_a_new_connection_is_the_same_life() -> None:
    known = roster("prefill-0")
    assert known.heard(b"reconnected", "prefill-0", "prefill-0-life-1", 1.0) is not None
    assert known.heard(b"reconnected", "prefill-0", "another-life", 1.0) is None
    assert known.heard(b"unknown", None, None, 1.0) is None


def test_placement_sees_workers_in_the_order_of_their_numbers_with_what_their_engines_said() -> None:
    known = roster("decode-0", "prefill-0", "decode-7")
    facts = known.facts()
    assert [(w.worker_id, w.index) for w in facts] == [("prefill-0", 0), ("decode-0", 1), ("decode-7", 2)]
    engine = hello().engine
    assert (facts[0].num_blocks, facts[0].block_size) == (engine.num_blocks, engine.block_size)
    assert facts[0].max_num_batched_tokens == engine.max_num_batched_tokens


def test_layouts_tell_who_can_be_paired_and_what_differs() -> None:
    known = roster("prefill-0")
    known.admit(b"d", hello("decode-0", fingerprint="g", layout_fields={"dtype": "float16"}), 0.0)
    assert not known.has_pair()
    assert known.refused_pairs() == [RefusedPair("prefill-0", "decode-0", ["dtype (bfloat16 / float16)"])]
    assert known.compatible == frozenset()


def test_workers_with_other_numbers_of_ranks_are_paired_if_their_caches_can_be_cut() -> None:
    known = roster("prefill-0")
    layout = {"dtype": "bfloat16", "memory_order": "head, token, content", "tp_size": "1"}
    for worker_id, tp_size in (("prefill-0", "1"), ("decode-0", "2"), ("decode-1", "1")):
        fields = layout | {"tp_size": tp_size}
        known.admit(worker_id.encode(), hello(worker_id, epoch="new", fingerprint=tp_size, layout_fields=fields), 0.0)
    assert known.has_pair()
    assert known.refused_pairs() == []
    assert known.compatible == {("1", "2")}


def test_one_worker_that_fits_nobody_does_not_keep_the_others_apart() -> None:
    known = roster("prefill-0", "decode-0")
    known.admit(b"d", hello("decode-1", fingerprint="g", layout_fields={"dtype": "float16"}), 0.0)
    assert known.has_pair()
    assert [(pair.prefill, pair.decode) for pair in known.refused_pairs()] == [("prefill-0", "decode-1")]
