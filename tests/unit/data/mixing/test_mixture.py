"""Which examples an epoch has of several sources: exact parts, repeats that are fair, and one draw for a seed."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperpod_ft.data.mixing import mixture
from hyperpod_ft.data.mixing.mixture import Draw, Examples

COUNTS = st.lists(st.integers(0, 60), min_size=1, max_size=5)
SEED = st.integers(0, 2**31 - 1)


def sources(counts: list[int], documents: int = 1, **settings: list[float] | list[int]) -> list[Examples]:
    """Sources one after the other; each raw row has `documents` examples."""
    found, first, kept = [], 0, np.ones(sum(counts), np.bool_)
    for number, count in enumerate(counts):
        own = {key: values[number] for key, values in settings.items()}
        found.append(Examples(np.array([*range(first, first + count, documents), first + count]), kept, **own))
        first += count
    return found


def same(one: Draw, other: Draw) -> bool:
    arrays = [(draw.train, *draw.validation) for draw in (one, other)]
    return all(np.array_equal(*pair) for pair in zip(*arrays, strict=True))


@settings(deadline=None)
@given(counts=COUNTS, share=st.floats(0, 0.9), seed=SEED)
def test_without_weights_every_example_is_in_one_split_once(counts: list[int], share: float, seed: int) -> None:
    drawn = mixture.draw(sources(counts), share, seed)
    assert sorted([*drawn.train, *np.concatenate(drawn.validation)]) == list(range(sum(counts)))
    for count, held_out in zip(counts, drawn.validation, strict=True):
        assert len(held_out) == max(0, min(round(count * share), count - 1)), "of each source by itself"
    assert same(drawn, mixture.draw(sources(counts), share, seed)), "a function of counts and seed"


@settings(deadline=None)
@given(count=st.integers(1, 300), share=st.floats(0, 0.9), seed=SEED)
def test_one_source_keeps_the_order_of_its_draw(count: int, share: float, seed: int) -> None:
    """As before there could be several: prepared datasets have the same bytes."""
    order = np.random.default_rng([seed, 1]).permutation(count)
    held_out = min(round(count * share), count - 1)
    drawn = mixture.draw(sources([count]), share, seed)
    assert drawn.train.tolist() == order[held_out:].tolist()
    assert drawn.validation[0].tolist() == order[:held_out].tolist()


def test_another_seed_is_another_draw_and_sources_are_drawn_differently() -> None:
    assert not same(mixture.draw(sources([50]), 0.2, 1), mixture.draw(sources([50]), 0.2, 2))
    drawn = mixture.draw(sources([50, 50]), 0.2, 1)
    assert drawn.validation[0].tolist() != (drawn.validation[1] - 50).tolist()


@settings(deadline=None)
@given(count=st.integers(0, 60), documents=st.integers(1, 7), share=st.floats(0, 0.9), seed=SEED)
def test_the_examples_of_a_raw_row_are_in_one_split(count: int, documents: int, share: float, seed: int) -> None:
    (source,) = sources([count], documents)
    drawn = mixture.draw([source], share, seed)
    train, validation = (set((indices // documents).tolist()) for indices in (drawn.train, drawn.validation[0]))
    assert train.isdisjoint(validation) and len(train | validation) == -(-count // documents)
    assert sorted([*drawn.train, *drawn.validation[0]]) == list(range(count))
    assert train or not count, "something is left to train on"


@settings(deadline=None)
@given(
    weighted=st.lists(st.tuples(st.integers(1, 60), st.decimals("0.001", 100, places=3)), min_size=1, max_size=5),
    seed=SEED,
)
def test_weights_give_exact_parts(weighted: list[tuple[int, float]], seed: int) -> None:
    counts, weights = [count for count, _ in weighted], [float(weight) for _, weight in weighted]
    drawn = mixture.draw(sources(counts, weight=weights), 0.0, seed)
    total, exact = sum(counts), [Fraction(str(weight)) for weight in weights]
    assert sum(drawn.taken) == len(drawn.train) == total
    for taken, share in zip(drawn.taken, exact, strict=True):
        quota = total * share / sum(exact)
        assert int(quota) <= taken <= int(quota) + 1
    times, first = Counter(drawn.train.tolist()), 0
    for count, taken in zip(counts, drawn.taken, strict=True):
        own = [times[example] for example in range(first, first + count)]
        assert sum(own) == taken
        assert {taken // count, -(-taken // count)} >= set(own), "whole passes, and a part of one more"
        first += count


def test_rows_of_a_source_are_exactly_that_many() -> None:
    drawn = mixture.draw(sources([10, 100, 7], rows=[25, 40, None]), 0.0, 3)  # type: ignore[list-item]
    assert (drawn.available, drawn.taken) == ((10, 100, 7), (25, 40, 7))
    times = Counter(drawn.train.tolist())
    assert sorted(times[example] for example in range(10)) == [2] * 5 + [3] * 5
    assert sum(example in times for example in range(10, 110)) == 40


def test_the_largest_remainders_get_one_more() -> None:
    assert mixture.largest_remainder(10, [Fraction(1)] * 3) == [4, 3, 3]
    assert mixture.largest_remainder(7, [Fraction("0.1"), Fraction("0.9")]) == [1, 6]
    assert mixture.parts([30, 70], [0.1, 0.2], [None, None]) == [33, 67], "0.1 is a tenth"


def test_a_source_for_validation_alone_is_never_trained_on() -> None:
    trained, only = sources([20, 6])
    drawn = mixture.draw([trained, Examples(only.edges, only.kept, trains=False)], 0.25, 5)
    assert (drawn.available, drawn.taken) == ((15, 0), (15, 0))
    assert sorted(drawn.validation[1]) == list(range(20, 26)) and len(drawn.validation[0]) == 5
    assert set(drawn.train) < set(range(20))


@settings(deadline=None)
@given(counts=COUNTS)
def test_sources_are_spread_evenly(counts: list[int]) -> None:
    source_of = mixture.spread(counts)
    assert np.bincount(source_of, minlength=len(counts)).tolist() == counts
    for number, count in enumerate(counts):
        seen = (source_of == number).cumsum()
        expected = np.arange(1, len(source_of) + 1) * count / max(1, len(source_of))
        assert np.abs(seen - expected).max(initial=0) <= len(counts)


@pytest.mark.parametrize("counts", [[], [0], [0, 0]])
def test_nothing_is_spread_over_nothing(counts: list[int]) -> None:
    assert mixture.spread(counts).tolist() == []


@settings(deadline=None)
@given(counts=COUNTS, share=st.floats(0, 0.9), seed=SEED, at_once=st.integers(1, 50))
def test_parts_of_any_size_are_the_same_draw(counts: list[int], share: float, seed: int, at_once: int) -> None:
    whole = mixture.draw(sources(counts, 2), share, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture, "_AT_ONCE", at_once)
        assert same(mixture.draw(sources(counts, 2), share, seed), whole)


def test_only_kept_examples_are_drawn() -> None:
    (source,) = sources([30], 3)
    source.kept[[0, 1, 2, 4, 29]] = False
    edges = np.delete(source.edges, 0)  # the first raw row has no example that is kept
    drawn = mixture.draw([Examples(edges, source.kept)], 0.3, 1)
    assert sorted([*drawn.train, *drawn.validation[0]]) == np.flatnonzero(source.kept).tolist()
