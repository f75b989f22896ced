"""Which pairs of a source and a target are in which row, and the rows' arrays."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hyperpod_ft.data.packing import IGNORED, Integers, Packing, shuffled, token_positions


def pack_seq2seq(
    how: Literal["bfd", "none"],
    starts: Integers,
    lengths: Integers,
    targets: Integers,
    capacities: tuple[int, int],
    seed: int,
    group: int = 0,
) -> tuple[Packing, Packing]:
    """The sources and the targets of a group of pairs in rows; a pair is both, one after the other, in one stream.

    The k-th span of one packing belongs to the k-th of the other.
    starts, lengths, targets: int64 [pairs], where each begins, its tokens, and those of its target. `capacities`: of a
    row's parts; every pair fits. The result depends only on the arguments.
    """
    sources = lengths - targets
    if how == "none":
        rows, count = np.arange(len(starts)), len(starts)
    else:
        bins = best_fit_pairs(np.stack([sources, targets], axis=1), capacities)
        placed, rows, count = shuffled(bins, seed, group)
        starts, sources, targets = starts[placed], sources[placed], targets[placed]
    return Packing(starts, sources, rows, count), Packing(starts + sources, targets, rows, count)


@dataclass(frozen=True)
class Seq2SeqRows:
    """Rows of an encoder-decoder, int32: the first two [rows, max_length], the others [rows, max_target_length].

    `documents` number the sources of a row from 1, `decoder_documents` their targets; 0 is padding. `labels` are what
    the decoder predicts where it reads `decoder_input_ids`, -100 in the padding.
    """

    input_ids: NDArray[np.int32]
    documents: NDArray[np.int32]
    decoder_input_ids: NDArray[np.int32]
    decoder_documents: NDArray[np.int32]
    labels: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.input_ids)


def fill_seq2seq(
    packed: tuple[Packing, Packing],
    ids: NDArray[np.int32],
    first: int,
    stop: int,
    widths: tuple[int, int],
    pad: int,
    decoder_start: int,
) -> Seq2SeqRows:
    """Rows `first` to `stop`, from the token stream `ids`.

    Documents have the same numbers in both parts of a row. Labels are the target's tokens, and decoder inputs the same
    one place later, after `decoder_start`.
    """
    input_ids, documents, _ = _fill(packed[0], ids, first, stop, widths[0], pad)
    tokens, decoder_documents, begins = _fill(packed[1], ids, first, stop, widths[1], pad)
    shifted = np.roll(tokens, 1, axis=1)
    shifted[begins] = decoder_start
    return Seq2SeqRows(
        input_ids,
        documents,
        decoder_input_ids=np.where(decoder_documents > 0, shifted, np.int32(pad)),
        decoder_documents=decoder_documents,
        labels=np.where(decoder_documents > 0, tokens, np.int32(IGNORED)),
    )


def _fill(
    packed: Packing, ids: NDArray[np.int32], first: int, stop: int, width: int, pad: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_]]:
    """Tokens, document numbers, and where documents begin: each [rows, width]."""
    found = token_positions(packed, first, stop)
    is_token = np.arange(width) < found.filled
    numbers = np.arange(len(found.rows)) - np.searchsorted(found.rows, found.rows) + 1

    shape = (stop - first, width)
    tokens, documents = np.full(shape, pad, np.int32), np.zeros(shape, np.int32)
    tokens[is_token] = ids[found.source]
    documents[is_token] = np.repeat(numbers, found.lengths)
    begins = np.zeros(shape, np.bool_)
    begins[is_token] = found.within == 0
    return tokens, documents, begins


# Pairs that are packed together. A pair is compared with every row that this many have opened.
_PAIRS = 1 << 14


def best_fit_pairs(sizes: Integers, capacities: tuple[int, int]) -> Integers:
    """The bin of each item, int64 [items]; sizes: int64 [items, 2], each at most its capacity."""
    bins = np.empty(len(sizes), np.int64)
    opened = 0
    for first in range(0, len(sizes), _PAIRS):
        found = _best_fit(sizes[first : first + _PAIRS], capacities)
        bins[first : first + _PAIRS] = opened + found
        opened += int(found.max()) + 1
    return bins


def _best_fit(sizes: Integers, capacities: tuple[int, int]) -> Integers:
    """Each item, the largest first, goes to the bin in which it leaves the least space."""
    # in units of 1 / (capacity x capacity), so that sums of shares are exact
    scale = np.array(capacities[::-1], np.int64)
    order = np.argsort(-(sizes * scale).sum(1), kind="stable")
    free = [np.full(len(sizes), capacity, np.int64) for capacity in capacities]
    space = np.full(len(sizes), 2 * capacities[0] * capacities[1], np.int64)
    bins = np.empty(len(sizes), np.int64)
    opened = 0
    for item, (source, target) in zip(order.tolist(), sizes[order].tolist(), strict=True):
        candidates = np.flatnonzero((free[0][:opened] >= source) & (free[1][:opened] >= target))
        if len(candidates):
            chosen = int(candidates[space[candidates].argmin()])
        else:
            chosen, opened = opened, opened + 1
        free[0][chosen] -= source
        free[1][chosen] -= target
        space[chosen] -= source * capacities[1] + target * capacities[0]
        bins[item] = chosen
    return bins
