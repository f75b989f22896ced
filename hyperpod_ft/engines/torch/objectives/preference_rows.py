"""The prepared rows of preferences, and what a model says of them before training."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hyperpod_ft.engines.batches import Batch, PackedSplit

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]

_COUNTED_ROWS = 1024  # at once


class PreferenceSplit(PackedSplit):
    """Rows of preferences: of the documents of a row, every first one is chosen and the next one rejected."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        blocks = np.array_split(np.arange(len(self)), -(-len(self) // _COUNTED_ROWS))
        documents = 2 * np.concatenate([self.pairs(block) for block in blocks])
        self._ends = documents.cumsum()
        self._begins = self._ends - documents
        self.reference: Floats = np.full(self.documents, np.nan, np.float32)
        """The reference log-probability of each document, in the order of the rows: fp32 [documents], NaN: unknown."""

    @property
    def documents(self) -> int:
        return int(self._ends[-1])

    def documents_of(self, rows: Rows) -> Rows:
        """The numbers of these rows' documents, int64 [documents]; row -1 has none."""
        numbers = [np.arange(self._begins[row], self._ends[row]) for row in rows if row >= 0]
        return np.concatenate([np.empty(0, np.int64), *numbers])

    def without_reference(self, rows: Rows) -> Rows:
        """The `rows` that have documents with an unknown reference."""
        unknown = np.concatenate([[0], np.isnan(self.reference).cumsum()])
        return rows[unknown[self._ends[rows]] > unknown[self._begins[rows]]]

    def batch(self, rows: Rows) -> Batch:
        reference = torch.from_numpy(self.reference[self.documents_of(rows)])
        return replace(super().batch(rows), reference=reference)
