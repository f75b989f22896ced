"""Which pairs share a row: their sources must fit its encoder part, and their targets its decoder part.

Vector bin packing in two dimensions. Best-fit decreasing by the sum of both shares of a row, one of the norm-based
greedy heuristics of Panigrahy et al. ("Heuristics for Vector Bin Packing", 2011). The order of examples is random, so
that a few thousand of them at a time pack about as well as all together, in time proportional to their number.
"""

import numpy as np

from hyperpod_ft.data.packing import Integers

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
