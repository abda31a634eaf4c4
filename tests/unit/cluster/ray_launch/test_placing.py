from hypothesis import given
from hypothesis import strategies as st

from cluster.ray_launch.messages import Claim
from cluster.ray_launch.placing import Ask, Node, choose_nodes, needs_of, shortage


def node(name: str, gpus: float = 8, cpus: float = 64, used: float = 0, **others: float) -> Node:
    total = {"GPU": gpus, "CPU": cpus, **others}
    return Node(name, f"10.0.0.{name}", total, {**total, "GPU": gpus - used})


def ask(worker_id: str, gpus: float, cpus: float = 1, parts: int = 1, **others: float) -> Ask:
    return Ask(worker_id, worker_id.partition("-")[0], needs_of(Claim(gpus, cpus, others)), parts)


def test_a_prefill_and_a_decode_worker_go_to_different_nodes() -> None:
    chosen = choose_nodes([ask("prefill-0", 1), ask("decode-0", 1)], [node("1"), node("2")])
    assert sorted(chosen.values()) == ["1", "2"]


def test_workers_of_one_role_spread_before_anything_else() -> None:
    asks = [ask("prefill-0", 1), ask("prefill-1", 1), ask("decode-0", 1), ask("decode-1", 1)]
    chosen = choose_nodes(asks, [node("1"), node("2")])
    assert chosen["prefill-0"] != chosen["prefill-1"]
    assert chosen["decode-0"] != chosen["decode-1"]


def test_the_largest_worker_chooses_first() -> None:
    asks = [ask("prefill-0", 4), ask("prefill-1", 4), ask("decode-0", 8)]
    chosen = choose_nodes(asks, [node("1"), node("2")])
    assert chosen["prefill-0"] == chosen["prefill-1"] != chosen["decode-0"]


def test_a_worker_that_comes_later_avoids_the_node_of_its_like() -> None:
    nodes = [node("1", used=1), node("2", used=1)]
    assert choose_nodes([ask("decode-1", 1)], nodes, [("1", "decode"), ("2", "prefill")]) == {"decode-1": "2"}


def test_a_custom_resource_decides() -> None:
    nodes = [node("1"), node("2", large_memory=1)]
    assert choose_nodes([ask("decode-0", 1, large_memory=1)], nodes) == {"decode-0": "2"}


def test_ranks_of_one_worker_are_not_spread_unless_that_is_asked_for() -> None:
    assert choose_nodes([ask("decode-0", 8)], [node("1", gpus=4), node("2", gpus=4)]) == {}


@given(st.lists(st.integers(1, 8), max_size=12), st.lists(st.integers(0, 16), max_size=5))
def test_no_node_is_promised_more_than_it_has(sizes: list[int], gpus: list[int]) -> None:
    asks = [ask(f"decode-{index}", size) for index, size in enumerate(sizes)]
    nodes = [node(str(index), gpus=count) for index, count in enumerate(gpus)]
    chosen = choose_nodes(asks, nodes)
    for place in nodes:
        taken = sum(item.needs["GPU"] for item in asks if chosen.get(item.worker_id) == place.node_id)
        assert taken <= place.free["GPU"]


def test_a_shortage_names_who_waits_for_what_and_what_there_is() -> None:
    text = shortage([ask("decode-0", 4), ask("decode-1", 4)], [node("1", used=6), node("2", used=5)])
    assert "decode-0, decode-1: 4 GPU and 1 CPU, on one node each" in text
    assert "10.0.0.1: 2 of 8 GPU free, 64 of 64 CPU free" in text
    assert "lower pools.<role>.replicas" in text


def test_a_worker_larger_than_every_node_is_told_so() -> None:
    text = shortage([ask("decode-0", 8)], [node("1", gpus=4)])
    assert "lower pools.decode.tensor_parallel" in text
    assert "ray.resources.prefill" in shortage([ask("prefill-0", 1, tpu=1)], [node("1")])
    assert "no node that is alive" in shortage([ask("decode-0", 1)], [])
    assert "pools.decode.across_nodes=true" in text


def test_ranks_that_may_be_anywhere_lack_only_what_all_nodes_together_lack() -> None:
    nodes = [node("1", gpus=4, used=2), node("2", gpus=4)]
    text = shortage([ask("decode-0", 1, parts=8)], nodes)
    assert "decode-0: 8 times 1 GPU and 1 CPU, on any nodes" in text
    assert "lower pools.<role>.replicas" in text
    assert "pools.decode.tensor_parallel" in shortage([ask("decode-0", 1, parts=9)], nodes)
    assert "pools.decode.tensor_parallel" in shortage([ask("decode-0", 1, parts=2, tpu=1)], nodes)
