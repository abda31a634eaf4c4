"""How an adapter is called everywhere in a cluster."""

import msgspec

from proxy.adapters.adapter import BASE_MODEL, Adapter

POET = Adapter("poet", "/adapters/poet")


def test_the_number_is_made_of_name_and_path_and_nothing_else() -> None:
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(POET), type=Adapter)
    assert again.adapter_id == POET.adapter_id == Adapter("poet", "/adapters/poet", "base", True).adapter_id
    others = [Adapter("poet", "/adapters/poet2"), Adapter("poet2", "/adapters/poet"), Adapter("poet/adapters", "/poet")]
    assert len({POET.adapter_id, BASE_MODEL, *(other.adapter_id for other in others)}) == 5
    assert all(1 <= other.adapter_id < 1 << 31 for other in others)


def test_each_further_load_names_the_same_directory_in_another_way() -> None:
    paths = [POET.loaded_again(times).path for times in range(3)]
    assert paths == ["/adapters/poet", "/adapters/poet/.", "/adapters/poet/./."]
    assert len({POET.loaded_again(times).adapter_id for times in range(3)}) == 3
    assert Adapter("poet", "org/on-the-hub").loaded_again(1).path == "org/on-the-hub"
