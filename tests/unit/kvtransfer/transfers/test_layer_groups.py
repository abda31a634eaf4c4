import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.transfers.layer_groups import LayerGroups

NAMES = [f"model.layers.{index}.self_attn.attn" for index in range(8)]


def told(groups: LayerGroups, names: list[str]) -> list[int]:
    return [groups.computed(name) for name in names]


def test_a_group_is_told_when_its_last_layer_is_computed_and_so_are_the_layers_left_over() -> None:
    assert told(LayerGroups(NAMES, 3), NAMES) == [0, 0, 3, 0, 0, 6, 0, 8]


def test_every_forward_pass_begins_anew() -> None:
    groups = LayerGroups(NAMES, 4)
    told(groups, NAMES[:5])
    groups.restart()
    assert told(groups, NAMES) == [0, 0, 0, 4, 0, 0, 0, 8]


def test_layers_behind_one_that_was_never_reported_do_not_count() -> None:
    assert told(LayerGroups(NAMES, 2), [*NAMES[:3], *NAMES[4:]]) == [0, 2, 0, 0, 0, 0, 0]


def test_names_that_hold_no_cache_are_passed_over() -> None:
    assert told(LayerGroups(NAMES, 1), ["encoder.0", NAMES[0]]) == [0, 1]


def test_a_group_larger_than_the_model_is_the_model() -> None:
    assert told(LayerGroups(NAMES, 1000), NAMES) == [0] * 7 + [8]


def test_a_negative_group_is_refused() -> None:
    with pytest.raises(ValueError, match="announce_layers is -1"):
        LayerGroups(NAMES, -1)


@given(st.randoms(use_true_random=False), st.integers(1, 9))
def test_in_any_order_only_layers_that_were_reported_are_told(chance: random.Random, per_group: int) -> None:
    groups = LayerGroups(NAMES, per_group)
    reported: set[str] = set()
    last = 0
    for name in chance.choices(NAMES, k=chance.randrange(30)):
        reported.add(name)
        if num_layers := groups.computed(name):
            assert set(NAMES[:num_layers]) <= reported
            assert num_layers > last
            last = num_layers
