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


def test_a_moving_average_begins_at_the_first_value() -> None:
    assert smoothed([5.0, 5.0, None, 5.0], 10) == pytest.approx([5.0, 5.0, None, 5.0])
    noisy = [2.0 + (-1) ** index for index in range(1_000)]
    assert smoothed(noisy, 100)[-1] == pytest.approx(2.0, abs=0.02)
