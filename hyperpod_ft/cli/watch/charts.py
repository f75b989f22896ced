"""Bars and curves of characters."""

import math
from collections.abc import Sequence

from rich.text import Text

_LEVELS = "▁▂▃▄▅▆▇█"
_NOT_FINITE = "×"


def bar(fraction: float, width: int, style: str) -> Text:
    """A bar of `width` cells, of which `fraction` (0 to 1) is filled, to half a cell; legible without colours too."""
    halves = round(min(max(fraction, 0.0), 1.0) * width * 2)
    drawn = Text("━" * (halves // 2), style)
    if halves % 2:
        drawn.append("╸", style)
    return drawn.append("─" * (width - len(drawn)), "bright_black")


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as a curve of at most `width` cells, from their lowest to their highest.

    A cell that stands for several values shows the highest, so that no spike disappears; × when one is not finite.
    """
    cells = min(width, len(values))
    parts = [values[number * len(values) // cells : (number + 1) * len(values) // cells] for number in range(cells)]
    highest = [max(part) if all(map(math.isfinite, part)) else math.nan for part in parts]
    finite = [value for value in highest if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    half = high / 2 - low / 2  # the whole difference may be more than a float holds

    def level(value: float) -> int:
        return round((value / 2 - low / 2) / half * (len(_LEVELS) - 1)) if half > 0 else 0

    return "".join(_LEVELS[level(value)] if math.isfinite(value) else _NOT_FINITE for value in highest)
