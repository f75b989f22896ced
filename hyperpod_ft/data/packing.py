"""Which tokens are in which row: best-fit packing, one wrapped stream, or one example per row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hyperpod_ft.data.best_fit import best_fit

Integers = NDArray[np.int64]
How = Literal["bfd", "wrapped", "none"]


@dataclass(frozen=True)
class Packing:
    """Spans of the token stream, row by row, in order; the rest of each row is padding.

    starts, lengths, rows: int64 [spans], `rows` ascending; row_count: rows, each with at least one span.
    """

    starts: Integers
    lengths: Integers
    rows: Integers
    row_count: int


def pack(
    how: How,
    starts: Integers,
    lengths: Integers,
    max_length: int,
    seed: int,
    group: int = 0,
) -> Packing:
    """Lay out a group of examples in rows of `max_length` tokens. The result depends only on the arguments.

    starts, lengths: int64 [examples, documents]; the documents of an example follow one another in one row. `bfd` and
    `none` need examples of <= max_length tokens, `wrapped` one document each.
    """
    if how == "wrapped":
        return _wrapped(starts.ravel(), lengths.ravel(), max_length)
    count, documents = lengths.shape
    if how == "none":
        return Packing(starts.ravel(), lengths.ravel(), np.repeat(np.arange(count), documents), count)
    placed, rows, count = shuffled(best_fit(lengths.sum(1), max_length), seed, group)
    return Packing(starts[placed].ravel(), lengths[placed].ravel(), np.repeat(rows, documents), count)


def merged(packings: Sequence[Packing], packing_of: NDArray[np.integer[Any]]) -> Packing:
    """The rows of several packings as one: row k is the next one of packing `packing_of[k]`."""
    places = [np.flatnonzero(packing_of == number)[packed.rows] for number, packed in enumerate(packings)]
    rows = np.concatenate(places)
    order = np.argsort(rows, kind="stable")
    starts, lengths = (
        np.concatenate([getattr(packed, name) for packed in packings])[order] for name in ("starts", "lengths")
    )
    return Packing(starts, lengths, rows[order], len(packing_of))


def shuffled(bins: Integers, seed: int, group: int) -> tuple[Integers, Integers, int]:
    """Examples in the order of their rows, the row of each, and the number of rows; `bins`: the bin of each example.

    The first bins have the longest examples; training needs them shuffled.
    """
    count = int(bins.max(initial=-1)) + 1
    rows = np.random.default_rng([seed, 2, group]).permutation(count)[bins]
    placed = np.argsort(rows, kind="stable")
    return placed, rows[placed], count


def _wrapped(starts: Integers, lengths: Integers, max_length: int) -> Packing:
    ends = lengths.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    # Cut the stream at the end of each example and of each row.
    cuts = np.union1d(ends, np.arange(0, total + max_length, max_length).clip(max=total))
    begins = cuts[:-1]
    example = np.searchsorted(ends, begins, side="right")
    within = begins - (ends - lengths)[example]
    row_count = -(-total // max_length)
    return Packing(starts[example] + within, np.diff(cuts), begins // max_length, row_count)


@dataclass(frozen=True)
class PackedRows:
    """Consecutive rows, in memory or memory-mapped: each array int32 [rows, max_length].

    `labels` are in their token's column (not shifted), -100 where there is no loss. `position_ids` start at 0 in
    each row, and again with each document and with the padding: no attention across a 0.
    """

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    position_ids: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.input_ids)


IGNORED = -100  # the label that torch's cross_entropy ignores


@dataclass(frozen=True)
class TokenPositions:
    """Where the tokens of consecutive rows come from and go; spans fill their rows from the left, in order."""

    source: Integers  # in the token stream, int64 [tokens]
    filled: Integers  # tokens of each row, int64 [rows, 1]
    within: Integers  # of each token in its span, int64 [tokens]
    lengths: Integers  # of the spans
    rows: Integers  # of the spans, from 0


def token_positions(packed: Packing, first: int, stop: int) -> TokenPositions:
    """The token positions of rows `first` to `stop`."""
    low, high = np.searchsorted(packed.rows, [first, stop])
    lengths, rows = packed.lengths[low:high], packed.rows[low:high] - first
    before = lengths.cumsum() - lengths
    within = np.arange(lengths.sum()) - np.repeat(before, lengths)
    source = within + np.repeat(packed.starts[low:high], lengths)
    filled = np.bincount(rows, weights=lengths, minlength=stop - first).astype(np.int64)[:, None]
    return TokenPositions(source, filled, within, lengths, rows)


def fill(
    packed: Packing,
    ids: NDArray[np.int32],
    trained: NDArray[np.bool_],
    first: int,
    stop: int,
    max_length: int,
    pad: int,
) -> PackedRows:
    """Rows `first` to `stop`, from the token stream `ids` (int32 [tokens]) and `trained` (bool [tokens])."""
    found = token_positions(packed, first, stop)
    columns, filled = np.arange(max_length, dtype=np.int32), found.filled.astype(np.int32)
    is_token = columns < filled
    shape = (stop - first, max_length)
    input_ids = np.full(shape, pad, np.int32)
    labels = np.full(shape, IGNORED, np.int32)
    position_ids = columns - filled  # correct in the padding; the rest is overwritten
    tokens = ids[found.source]
    input_ids[is_token] = tokens
    labels[is_token] = np.where(trained[found.source], tokens, np.int32(IGNORED))
    position_ids[is_token] = found.within
    return PackedRows(input_ids, labels, position_ids)
