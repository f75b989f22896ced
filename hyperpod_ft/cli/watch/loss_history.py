"""The losses in a metrics.jsonl that grows."""

import math
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyperpod_ft.runs.results.metrics import GrowingRows

_PACE_ROWS = 50


@dataclass
class LossHistory:
    """Reads only what was added since the last look; from the beginning when the file was written anew."""

    path: Path
    values: list[float] = field(default_factory=list)  # one a row
    newest: dict[str, Any] = field(default_factory=dict)  # the last row
    validation: tuple[int, float] | None = None  # the last validation loss, with its step
    _recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_PACE_ROWS))  # steps, seconds
    _rows: GrowingRows = field(init=False)

    def __post_init__(self) -> None:
        self._rows = GrowingRows(self.path)

    def read(self) -> None:
        """A file that is missing, or cannot be read now, leaves what is known."""
        try:
            added, replaced = self._rows.read()
        except OSError:
            return
        if replaced:
            self.values, self.newest, self.validation = [], {}, None
            self._recent.clear()
        for row in added:
            self._add(row)

    @property
    def seconds_per_step(self) -> float | None:
        """Over the newest rows: a single step may be much slower or faster; None before there are two."""
        if len(self._recent) < 2:
            return None
        (first, began), (last, ended) = self._recent[0], self._recent[-1]
        return (ended - began) / (last - first) if last > first and ended > began else None

    def _add(self, row: dict[str, Any]) -> None:
        self.newest = row
        if math.isfinite(seconds := _number(row.get("seconds"))):
            self._recent.append((row["step"], seconds))
        self.values.append(_number(row.get("loss")))
        if row.get("validation_loss") is not None:
            self.validation = row["step"], _number(row["validation_loss"])


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan
