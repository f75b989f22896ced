"""Curves of many points: none of their spikes is hidden, and a smooth one is not drawn towards zero."""

import math

import pytest

from hyperpod_ft.report.charts import smoothed, thinned


def test_every_spike_of_a_long_curve_stays() -> None:
    values: list[float | None] = [math.sin(index / 50) for index in range(100_000)]
    spikes = {123: 50.0, 45_678: -40.0, 99_998: 30.0}
    for index, value in spikes.items():
        values[index] = value
    kept = thinned(values, 2_000)
    assert len(kept) <= 2_000
    assert set(spikes) <= set(kept)
    assert (kept[0], kept[-1]) == (0, 99_999)
    assert kept == sorted(set(kept))


def test_both_ends_of_every_stretch_are_seen() -> None:
    """A curve that jumps at every step keeps its whole height everywhere."""
    values = [float(index % 2) for index in range(10_000)]
    kept = thinned(values, 100)
    for first in range(0, 9_000, 1_000):
        assert {values[index] for index in kept if first <= index < first + 1_000} == {0.0, 1.0}


def test_a_short_curve_keeps_all_but_what_is_unknown() -> None:
    assert thinned([1.0, None, 3.0, None], 4) == [0, 2]
    assert thinned([], 4) == []
    assert thinned([None] * 10, 4) == []


def test_a_moving_average_begins_at_the_first_value() -> None:
    assert smoothed([5.0, 5.0, None, 5.0], 10) == pytest.approx([5.0, 5.0, None, 5.0])
    noisy = [2.0 + (-1) ** index for index in range(1_000)]
    assert smoothed(noisy, 100)[-1] == pytest.approx(2.0, abs=0.02)
