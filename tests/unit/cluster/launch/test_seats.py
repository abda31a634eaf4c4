"""Who computes where, also when workers come and leave while others serve."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import PoolConfig
from cluster.launch.seats import BIND, DEVICES, ROLES, NothingFree, Seats
from cluster.launch.worker_plan import WorkerPlanner
from cluster.preflight.config_file import load_config
from cluster.preflight.machine import Machine

FOUR_GPUS = Machine(cores=(0, 1), gpus=("0", "1", "2", "3"))


def test_a_further_worker_gets_gpus_that_nobody_has() -> None:
    planner = WorkerPlanner(load_config(None, ["pools.decode.tensor_parallel=2"]), FOUR_GPUS)
    assert [plan.env[DEVICES] for plan in planner.first()] == ["0", "1,2"]
    more = planner.next("prefill")
    assert (more.worker_id, more.env[DEVICES]) == ("prefill-1", "3")
    with pytest.raises(NothingFree, match="needs 2, this machine has 4 and 0 are left; prefill-0, decode-0, prefill-1"):
        planner.next("decode")


def test_what_a_worker_had_is_dealt_again_and_its_id_is_not() -> None:
    planner = WorkerPlanner(load_config(None, ["pools.prefill.replicas=3"]), FOUR_GPUS)
    planner.first()
    planner.left("prefill-1")
    again = planner.next("decode")
    assert (again.worker_id, again.env[DEVICES]) == ("decode-1", "1")
    planner.left("decode-1")
    assert planner.next("prefill").worker_id == "prefill-3"


def test_without_free_cores_the_sentence_says_who_has_them() -> None:
    planner = WorkerPlanner(load_config(None, []), Machine(cores=(0, 1)))
    first = planner.first()
    with pytest.raises(NothingFree, match=r"no cores are free for another decode worker.*prefill-0, decode-0"):
        planner.next("decode")
    planner.left("prefill-0")
    again = planner.next("decode")
    assert (again.cores, again.env[BIND]) == (first[0].cores, "0")


def test_where_the_operator_names_devices_there_is_always_room() -> None:
    config = load_config(None, [f"pools.decode.env.{DEVICES}=0"])
    planner = WorkerPlanner(config, replace(FOUR_GPUS, gpus=("0", "1")))
    planner.first()
    assert [planner.next("decode").env[DEVICES] for _ in range(3)] == ["0"] * 3


@given(st.lists(st.tuples(st.sampled_from(ROLES), st.booleans(), st.integers(0, 30)), max_size=60))
def test_no_core_is_dealt_twice_and_none_gets_lost(steps: list[tuple[str, bool, int]]) -> None:
    shares = [(2 * number, 2 * number + 1) for number in range(6)]
    seats = Seats(Machine(cores=tuple(range(12))), shares)
    pools = {"prefill": PoolConfig(tensor_parallel=1), "decode": PoolConfig(tensor_parallel=2)}
    held: dict[str, tuple[tuple[int, ...], ...]] = {}
    names: set[str] = set()
    for role, comes, which in steps:
        if comes:
            try:
                seat = seats.take(role, pools[role])  # type: ignore[arg-type]
            except NothingFree:
                assert len(shares) - sum(map(len, held.values())) < pools[role].tensor_parallel
                continue
            assert seat.worker_id not in names
            names.add(seat.worker_id)
            held[seat.worker_id] = seat.cores
        elif held:
            leaver = sorted(held)[which % len(held)]
            seats.give_back(leaver)
            del held[leaver]
        dealt = [share for cores in held.values() for share in cores]
        assert len(dealt) == len(set(dealt))
