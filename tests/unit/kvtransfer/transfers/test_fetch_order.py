import random

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.transfers.fetch_order import Computed, FetchOrder, Portion

LAYER = 100


def drained(order: FetchOrder, computed: Computed, max_bytes: int = 10_000) -> list[Portion]:
    found = []
    while portion := order.next(computed, max_bytes):
        found.append(portion)
    return found


def test_whole_blocks_go_together_as_many_as_fit() -> None:
    order = FetchOrder(5, [LAYER] * 3)
    assert drained(order, Computed(5, 0, 0), 2 * 3 * LAYER) == [
        Portion(0, 2, 0, 3, 600), Portion(2, 4, 0, 3, 600), Portion(4, 5, 0, 3, 300),
    ]  # fmt: skip


def test_a_block_larger_than_a_piece_goes_layer_by_layer() -> None:
    order = FetchOrder(1, [LAYER, LAYER, 250])
    assert drained(order, Computed(1, 0, 0), 2 * LAYER) == [Portion(0, 1, 0, 2, 200), Portion(0, 1, 2, 1, 250)]


def test_layers_are_asked_for_as_they_are_computed() -> None:
    order = FetchOrder(4, [LAYER] * 4)
    assert drained(order, Computed(2, 0, 0)) == [Portion(0, 2, 0, 4, 800)]
    assert drained(order, Computed(2, 4, 1)) == [Portion(2, 4, 0, 1, 200)]
    assert drained(order, Computed(2, 4, 3)) == [Portion(2, 4, 1, 2, 400)]
    assert drained(order, Computed(4, 0, 0)) == [Portion(2, 4, 3, 1, 200)]
    assert drained(order, Computed(4, 0, 0)) == []


def test_a_block_that_is_whole_comes_before_one_that_was_begun() -> None:
    order = FetchOrder(3, [LAYER] * 2)
    assert drained(order, Computed(1, 3, 1)) == [Portion(0, 1, 0, 2, 200), Portion(1, 3, 0, 1, 200)]


def test_what_was_asked_for_in_part_is_completed_without_repeating() -> None:
    order = FetchOrder(4, [LAYER] * 2)
    assert order.next(Computed(0, 4, 1), 2 * LAYER) == Portion(0, 2, 0, 1, 200)
    assert drained(order, Computed(4, 0, 0)) == [Portion(0, 2, 1, 1, 200), Portion(2, 4, 0, 2, 400)]


@given(st.randoms(use_true_random=False))
def test_every_layer_of_every_unit_is_asked_for_once_in_bounded_pieces(chance: random.Random) -> None:
    num_units, layer_bytes = chance.randint(0, 12), [chance.randint(1, 300) for _ in range(chance.randint(1, 6))]
    order = FetchOrder(num_units, layer_bytes)
    asked: set[tuple[int, int]] = set()
    computed = Computed(0, 0, 0)
    while computed != Computed(num_units, 0, 0):
        if computed.num_begun and computed.num_layers < len(layer_bytes) and chance.random() < 0.7:
            computed = Computed(computed.num_complete, computed.num_begun, computed.num_layers + 1)
        elif computed.num_begun:
            computed = Computed(computed.num_begun, 0, 0)
        elif chance.random() < 0.5:
            computed = Computed(computed.num_complete, chance.randint(computed.num_complete, num_units), 1)
        else:
            computed = Computed(chance.randint(computed.num_complete, num_units), 0, 0)
        max_bytes = chance.randint(1, 2000)
        is_last = computed == Computed(num_units, 0, 0)
        for _ in range(1000 if is_last else chance.randrange(4)):
            if not (portion := order.next(computed, max_bytes)):
                break
            layers = range(portion.first_layer, portion.first_layer + portion.num_layers)
            assert portion.num_bytes == (portion.end - portion.first) * sum(layer_bytes[layer] for layer in layers)
            assert portion.num_bytes <= max_bytes or (portion.end - portion.first, len(layers)) == (1, 1)
            for unit in range(portion.first, portion.end):
                assert unit < computed.num_complete or (unit < computed.num_begun and layers[-1] < computed.num_layers)
                for layer in layers:
                    assert (unit, layer) not in asked
                    asked.add((unit, layer))
    assert len(asked) == num_units * len(layer_bytes)
