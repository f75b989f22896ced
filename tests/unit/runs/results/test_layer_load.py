"""What a step's numbers of tokens say of the experts of a mixture."""

import pytest

from hyperpod_ft.runs.results.expert_load import LayerLoad, Loads, facts, grew_uneven, layer_load, metrics, read

EVEN = {"a": LayerLoad(1.5, 0.5, 0), "b": LayerLoad(2.0, 0.25, 0)}


def test_a_load_is_a_share_of_the_mean() -> None:
    assert layer_load([6, 3, 3, 0]) == LayerLoad(2.0, 0.0, 1)
    assert layer_load([1, 1, 1]) == LayerLoad(1.0, 1.0, 0)
    assert layer_load([0, 0]) == LayerLoad(0.0, 0.0, 2), "a layer that no token reaches"


def test_a_row_has_the_worst_layer_and_the_dead_experts_of_all() -> None:
    loads = {"a": LayerLoad(3.0, 0.0, 2), "b": LayerLoad(4.0, 0.0, 1)}
    assert metrics(loads) == {"expert_load_max": 4.0, "dead_experts": 3}
    assert metrics({}) == {}


@pytest.mark.parametrize(
    ("last", "uneven"),
    [
        ({}, False),
        (EVEN, False),
        (EVEN | {"a": LayerLoad(3.9, 0.1, 0)}, False),
        (EVEN | {"a": LayerLoad(4.0, 0.1, 0)}, True),
        (EVEN | {"a": LayerLoad(1.5, 0.0, 1)}, False),
        (EVEN | {"a": LayerLoad(1.5, 0.0, 2)}, True),
    ],
)
def test_routing_that_collapses_is_noticed(last: Loads, uneven: bool) -> None:
    assert grew_uneven(EVEN if last else {}, last) == uneven


@pytest.mark.parametrize("damaged", [(1.5, 0.5, 10**400), (1.5, 0.5, -1), (float("inf"), 0.5, 0), (1.5, -0.5, 0)])
def test_a_damaged_record_says_nothing(damaged: tuple[float, float, int]) -> None:
    assert read(facts(EVEN, EVEN)) == (EVEN, EVEN)
    assert read(facts(EVEN, EVEN | {"a": LayerLoad(*damaged)})) == ({}, {})
