"""The raw rows of a dataset in the order of its files: all, those with given numbers, or a sample."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hyperpod_ft.data import reading
from hyperpod_ft.data.reading import BadRow, Chunk, RawRow
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import count


@dataclass(frozen=True)
class RawRows:
    """Rows are numbered from 1."""

    directory: Path
    chunks: Sequence[Chunk]

    def __iter__(self) -> Iterator[RawRow | BadRow]:
        for chunk in self.chunks:
            yield from reading.read(self.directory, chunk)

    def numbered(self, number: int) -> RawRow | BadRow:
        """Raises UserError when there are fewer rows."""
        if found := self._numbered([number]):
            return found[0]
        rows = count(sum(self._counts()), "row")
        raise UserError(f"row {number:,}: the dataset has {rows}", "give a number from 1 on")

    def sampled(self, rows: int, seed: int) -> list[RawRow | BadRow]:
        """So many rows, drawn by chance, in the order of the files; all if there are fewer."""
        there = sum(self._counts())
        drawn = np.random.default_rng(seed).choice(there, min(rows, there), replace=False)
        return self._numbered([place + 1 for place in drawn.tolist()])

    def _numbered(self, numbers: Collection[int]) -> list[RawRow | BadRow]:
        found: list[RawRow | BadRow] = []
        before = 0
        for chunk, rows in zip(self.chunks, self._counts(), strict=True):
            here = {number - before - 1 for number in numbers if 0 < number - before <= rows}
            if here:
                found += reading.read(self.directory, chunk, here)
            before += rows
        return found

    def _counts(self) -> list[int]:
        return [reading.count(self.directory, chunk) for chunk in self.chunks]
