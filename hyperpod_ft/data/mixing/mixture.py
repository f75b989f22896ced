"""Which examples an epoch has of each source, and in which order: pure functions of counts, groups and the seed.

The examples of a raw row are a group: all of them are for training, or all for validation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Examples:
    """What one source has: int64 [examples], which examples of the data they are, and the raw row of each, ascending.

    `weight` and `rows` are as in the run file.
    """

    indices: Integers
    groups: Integers
    trains: bool = True
    weight: float | None = None
    rows: int | None = None

    @classmethod
    def of_rows(cls, count: int) -> "Examples":
        """A source alone, whose raw rows became an example each."""
        return cls(np.arange(count), np.arange(count))


@dataclass(frozen=True)
class Draw:
    """The examples of each split, int64 indices in an order drawn from the seed.

    `train` is an epoch, of all sources evenly mixed. Of each source: `available` counts its examples for training,
    `taken` those in the epoch, repeats included, and `validation` has those for validation.
    """

    train: Integers
    validation: tuple[Integers, ...]
    available: tuple[int, ...]
    taken: tuple[int, ...]


def draw(sources: Sequence[Examples], validation_share: float, seed: int) -> Draw:
    """The epoch and the validation of these sources; a source alone keeps the order that it is drawn in."""
    train, validation = [], []
    for number, source in enumerate(sources):
        share = validation_share if source.trains else 1.0
        order, held_out = drawn_groups(source.groups, share, (seed, 1, number), keep_one=source.trains)
        train.append(source.indices[order[held_out:]])
        validation.append(source.indices[order[:held_out]])
    available = [len(examples) for examples in train]
    taken = parts(available, [source.weight for source in sources], [source.rows for source in sources])
    # repeats follow whole passes, so that they are as far apart as they can be
    epoch = [np.resize(examples, count) for examples, count in zip(train, taken, strict=True)]
    return Draw(mixed(epoch), tuple(validation), tuple(available), tuple(taken))


def drawn_groups(
    groups: Integers, share: float, entropy: Sequence[int], *, keep_one: bool = True
) -> tuple[Integers, int]:
    """The places of all examples in an order in which those of a group follow one another, and how many are held out.

    These come first: `share` of the groups, but with `keep_one` not all. `entropy` is a seed; zeros at its end change
    nothing.
    """
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    sizes = np.diff(starts, append=len(groups))
    chosen = np.random.default_rng(entropy).permutation(len(starts))
    held_out = min(round(len(starts) * share), max(len(starts) - keep_one, 0))
    lengths = sizes[chosen]
    before = lengths.cumsum() - lengths
    order = np.arange(len(groups)) + np.repeat(starts[chosen] - before, lengths)
    return order, int(lengths[:held_out].sum())


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


def spread(counts: Sequence[int]) -> Integers:
    """Items of several sources in one row, each source evenly over all of it: the source of each, int64 [items].

    The k-th item of a source is its own k-th. Any part of the row has about the same shares as all of it.
    """
    places = np.concatenate([np.empty(0), *((np.arange(count) + 0.5) / count for count in counts if count)])
    return np.repeat(np.arange(len(counts)), counts)[np.argsort(places, kind="stable")]


def mixed(orders: Sequence[Integers]) -> Integers:
    """Items of several sources, evenly mixed, each source in its own order."""
    source_of = spread([len(order) for order in orders])
    result = np.empty(len(source_of), np.int64)
    for number, order in enumerate(orders):
        result[source_of == number] = order
    return result
