"""Which examples an epoch has of each source, and in which order: pure functions of counts, groups and the seed.

The examples of a raw row are a group: all of them are for training, or all for validation.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.signedinteger[Any]]
"""Of examples; as there are many, in 4 bytes if these suffice."""

_AT_ONCE = 1 << 16  # whose temporary arrays are small


@dataclass(frozen=True)
class Examples:
    """What one source has: the examples of the data that are in its raw rows, and of these the ones that are kept.

    edges: where each raw row begins that has some, and where the last one ends; kept: bool [examples of the data].
    `weight` and `rows` are as in the run file.
    """

    edges: Numbers
    kept: NDArray[np.bool_]
    trains: bool = True
    weight: float | None = None
    rows: int | None = None

    @classmethod
    def of_rows(cls, count: int) -> "Examples":
        """A source alone, whose raw rows became an example each."""
        return cls(numbers(0, count + 1), np.ones(count, np.bool_))


@dataclass(frozen=True)
class Draw:
    """The examples of each split, by number, in an order drawn from the seed.

    `train` is an epoch, of all sources evenly mixed. Of each source: `available` counts its examples for training,
    `taken` those in the epoch, repeats included, and `validation` has those for validation.
    """

    train: Numbers
    validation: tuple[Numbers, ...]
    available: tuple[int, ...]
    taken: tuple[int, ...]


def draw(sources: Sequence[Examples], validation_share: float, seed: int) -> Draw:
    """The epoch and the validation of these sources; a source alone keeps the order that it is drawn in."""
    train, validation = [], []
    for number, source in enumerate(sources):
        share = validation_share if source.trains else 1.0
        held_out, others = drawn_rows(source, share, (seed, 1, number))
        validation.append(held_out)
        train.append(others)
    available = [len(examples) for examples in train]
    taken = parts(available, [source.weight for source in sources], [source.rows for source in sources])
    # repeats follow whole passes, so that they are as far apart as they can be
    epoch = [
        examples[:count] if count <= len(examples) else np.resize(examples, count)
        for examples, count in zip(train, taken, strict=True)
    ]
    return Draw(mixed(epoch), tuple(validation), tuple(available), tuple(taken))


def numbers(first: int, stop: int) -> Numbers:
    """From `first` up to but without `stop`."""
    return np.arange(first, stop, dtype=number_type(stop))


def number_type(stop: int) -> type[np.int32] | type[np.int64]:
    """The smallest that holds all numbers below `stop`."""
    return np.int32 if stop <= 1 << 31 else np.int64


def drawn_rows(source: Examples, share: float, entropy: Sequence[int]) -> tuple[Numbers, Numbers]:
    """The examples that are held out, and the others, in an order in which those of a raw row follow one another.

    Held out are `share` of the raw rows, but not all of a source that is trained on. `entropy` is a seed; zeros at its
    end change nothing.
    """
    count = len(source.edges) - 1
    chosen = numbers(0, count)
    np.random.default_rng(entropy).shuffle(chosen)
    held_out = min(round(count * share), max(count - source.trains, 0))
    # filled part by part, since there may be as many as fit in memory only once
    order = np.empty(np.count_nonzero(source.kept[source.edges[0] : source.edges[-1]]), source.edges.dtype)
    end = _fill(order, source, chosen[:held_out])
    _fill(order[end:], source, chosen[held_out:])
    return order[:end], order[end:]


def _fill(order: Numbers, source: Examples, rows: Numbers) -> int:
    """Write the examples of these raw rows to the beginning of `order`, and return how many there are."""
    done = 0
    for first in range(0, len(rows), _AT_ONCE):
        part = rows[first : first + _AT_ONCE]
        begins = source.edges[part]
        lengths = source.edges[part + 1] - begins
        before = lengths.cumsum() - lengths
        examples = np.arange(lengths.sum()) + np.repeat(begins - before, lengths)
        kept = examples[source.kept[examples]]
        order[done : done + len(kept)] = kept
        done += len(kept)
    return done


def parts(available: Sequence[int], weights: Sequence[float | None], rows: Sequence[int | None]) -> list[int]:
    """How many examples an epoch has of each source: all, or `rows`, or with weights its part of as many as there are.

    A source without examples has none to repeat.
    """
    if any(weight is not None for weight in weights):
        # as written: 0.1 is a tenth
        shares = [Fraction(str(weight)) if weight is not None else Fraction() for weight in weights]
        return largest_remainder(sum(available), shares)
    return [count if wanted is None else wanted for count, wanted in zip(available, rows, strict=True)]


def largest_remainder(total: int, shares: Sequence[Fraction]) -> list[int]:
    """`total` divided as the shares are: each gets its quota without the fraction, and the largest fractions one more.

    Of equal fractions, the first comes first.
    """
    quotas = [total * share / sum(shares) for share in shares]
    result = [int(quota) for quota in quotas]
    by_fraction = sorted(range(len(quotas)), key=lambda number: result[number] - quotas[number])
    for number in by_fraction[: total - sum(result)]:
        result[number] += 1
    return result


def spread(counts: Sequence[int]) -> NDArray[np.integer[Any]]:
    """Items of several sources in one row, each source evenly over all of it: the source of each.

    The k-th item of a source is its own k-th. Any part of the row has about the same shares as all of it.
    """
    kind = np.min_scalar_type(len(counts))
    return np.concatenate([np.empty(0, kind), *(found.astype(kind) for found in _spread(counts))])


def _spread(counts: Sequence[int]) -> Iterator[NDArray[np.integer[Any]]]:
    """Part by part: the k-th of n items is at (k + 1/2) / n of the row."""
    parts = sum(counts) // _AT_ONCE + 1
    edges = [
        [bisect_left(range(count), part / parts, key=lambda item: (item + 0.5) / count) for count in counts]
        for part in range(parts + 1)
    ]
    for firsts, stops in pairwise(edges):
        items = [np.arange(*ends) for ends in zip(firsts, stops, strict=True)]
        places = [(own + 0.5) / count for own, count in zip(items, counts, strict=True)]
        sources = np.repeat(np.arange(len(counts)), [len(own) for own in items])
        yield sources[np.argsort(np.concatenate([np.empty(0), *places]), kind="stable")]


def mixed(orders: Sequence[Numbers]) -> Numbers:
    """Items of several sources, evenly mixed, each source in its own order."""
    if len(orders) == 1:
        return orders[0]
    source_of = spread([len(order) for order in orders])
    result = np.empty(len(source_of), np.result_type(*orders))
    for number, order in enumerate(orders):
        result[source_of == number] = order
    return result
