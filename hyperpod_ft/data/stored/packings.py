"""Where the tokens of all rows come from, in unnamed files: packed group by group, and read block by block."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hyperpod_ft.data.mixing.mixture import spread
from hyperpod_ft.data.packing import Packing, merged
from hyperpod_ft.data.prepared import blocks_of
from hyperpod_ft.data.stored.spool import Spool
from hyperpod_ft.data.stored.token_stream import StoredTokens
from hyperpod_ft.data.tokens import Tokens

# Examples that are packed together: few enough that it takes little memory, so many that it costs no row.
GROUP = 1 << 20

Parts = tuple[Packing, ...]
"""Of rows: one, or the sources and the targets of an encoder-decoder."""


class StoredPackings:
    """The packings of consecutive groups of examples, one after the other."""

    def __init__(self, directory: Path, *, pairs: bool) -> None:
        """`pairs`: of sources and targets. The files use space in `directory` until the process ends."""
        self._pairs = pairs
        self._starts = Spool(directory, np.int64)
        self._lengths, self._targets = Spool(directory, np.int32), Spool(directory, np.int32)
        self._ends = Spool(directory, np.int64)  # spans up to the end of each row

    @property
    def row_count(self) -> int:
        return len(self._ends)

    def add(self, packed: Parts) -> None:
        spans, *targets = packed
        ends = np.bincount(spans.rows, minlength=spans.row_count).cumsum()
        self._ends.append(len(self._starts) + ends)
        self._starts.append(spans.starts)
        self._lengths.append(spans.lengths)
        for part in targets:
            self._targets.append(part.lengths)

    def rows(self, first: int, stop: int) -> Parts:
        """The rows `first` to `stop`, numbered from 0."""
        ends = np.concatenate([self._ends.read(first - 1, first) if first else [0], self._ends.read(first, stop)])
        low, high = int(ends[0]), int(ends[-1])
        rows = np.repeat(np.arange(stop - first), np.diff(ends))
        lengths = self._lengths.read(low, high).astype(np.int64)
        spans = Packing(self._starts.read(low, high), lengths, rows, stop - first)
        if not self._pairs:
            return (spans,)
        targets = self._targets.read(low, high).astype(np.int64)
        return spans, replace(spans, starts=spans.starts + lengths, lengths=targets)


def blocks(packings: Sequence[StoredPackings], at_once: int) -> Iterator[Parts]:
    """The rows of several packings as one, a block at a time: row k is of packing `spread([their row counts])[k]`."""
    packing_of = spread([one.row_count for one in packings])
    done = [0] * len(packings)
    for first, stop in blocks_of(len(packing_of), at_once):
        here = packing_of[first:stop]
        stops = [before + int((here == number).sum()) for number, before in enumerate(done)]
        parts = [one.rows(*rows) for one, *rows in zip(packings, done, stops, strict=True)]
        done = stops
        yield tuple(merged(of_part, here) for of_part in zip(*parts, strict=True))


def in_memory(packed: Parts, stored: StoredTokens) -> tuple[Parts, Tokens]:
    """The same rows, and the tokens that they have, in their order."""
    first, *others = packed
    tokens = stored.copied(first.starts, np.sum([part.lengths for part in packed], axis=0))
    starts = tokens.starts
    return (replace(first, starts=starts), *(replace(part, starts=starts + first.lengths) for part in others)), tokens
