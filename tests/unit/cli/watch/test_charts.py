"""Bars and curves of characters."""

import math

from hyperpod_ft.cli.watch.charts import bar, sparkline


def test_a_bar_is_filled_to_half_a_cell() -> None:
    drawn = [bar(fraction, 4, "green").plain for fraction in (0, 0.5, 0.375, 1, 7, -1)]
    assert drawn == ["────", "━━──", "━╸──", "━━━━", "━━━━", "────"]


def test_a_curve_goes_from_the_lowest_to_the_highest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 20) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.5, 2.5], 20) == "▁▁"
    assert sparkline([], 20) == ""
    assert sparkline([1, math.nan, 3, math.inf], 20) == "▁×█×"
    assert sparkline([1e308, -1e308, 0], 20) == "█▁▅"


def test_no_spike_disappears() -> None:
    values = [1.0] * 100_000
    values[70_003] = 9.0
    curve = sparkline(values, 50)
    assert len(curve) == 50 and curve.count("█") == 1 and curve[35] == "█"
    values[20_000] = math.nan
    assert sparkline(values, 50)[10] == "×"
