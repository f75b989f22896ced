"""Numbers as a report writes them, with their units."""

import math
import time
from collections.abc import Sequence

from hyperpod_ft.runs.records import ISO_UTC


def duration(seconds: float) -> str:
    """
    >>> [duration(value) for value in (0.04, 7.25, 80, 7260, 200_000)]
    ['0.04 s', '7.2 s', '1 min 20 s', '2 h 1 min', '2 d 7 h']
    """
    if seconds < 1:
        return f"{seconds:.2g} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def number(value: float) -> str:
    """Four significant digits, three below 1; thousands separated.

    >>> [number(value) for value in (2.78023, 19, 6851.4, 1234567.0, 0.42734, 0.000213, math.nan)]
    ['2.780', '19', '6,851', '1,234,567', '0.427', '0.000213', 'nan']
    """
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.4g}" if abs(value) >= 1 else f"{value:.3g}"


def moment(text: str) -> str:
    """
    >>> moment("2026-11-02T20:22:12Z")
    '2 Nov 2026, 20:22 UTC'
    """
    known = time.strptime(text, ISO_UTC)
    return f"{known.tm_mday} {time.strftime('%b %Y, %H:%M', known)} UTC"


def percent(share: float) -> str:
    """
    >>> percent(0.634), percent(0.004), percent(1.0)
    ('63%', '0.4%', '100%')
    """
    return f"{share:.0%}" if share >= 0.095 or share == 0 else f"{share:.1%}"


def finite(value: object) -> float | None:
    """The value if it is a finite number, otherwise None."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def last_known(values: Sequence[float | None]) -> float | None:
    """The last value that is not None, if there is one."""
    return next((value for value in reversed(values) if value is not None), None)
