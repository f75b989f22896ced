"""Examples with the same text: the same tokens, of which the same are trained."""

from collections.abc import Iterable

import numpy as np
import xxhash
from numpy.typing import NDArray

from hyperpod_ft.data.mixing.mixture import Numbers, number_type
from hyperpod_ft.data.tokens import Tokens

_EXAMPLES = 1 << 20  # at once


def texts(blocks: Iterable[Tokens], documents: int) -> Numbers:
    """The number of each example's text: equal for equal texts; each block has whole examples, `documents` each.

    Texts are compared by a digest of 128 bits, in parts of which each has all of its texts, so that beside the digests
    there is little in memory.
    """
    digests = bytearray()
    for tokens in blocks:
        digests += _digests(tokens, documents)
    found = np.frombuffer(digests, np.uint64).reshape(-1, 2)
    part_of = np.frombuffer(digests, np.uint8)[:: found.strides[0]].copy()
    numbers, count = np.empty(len(found), number_type(len(found))), 0
    for part in range(1 << 8):
        here = np.flatnonzero(part_of == part)
        own = found[here]
        order = np.lexsort((own[:, 0], own[:, 1]))
        following = own[order]
        new = np.ones(len(order), np.bool_)
        new[1:] = (following[1:] != following[:-1]).any(1)
        numbers[here[order]] = count + new.cumsum() - 1
        count += int(new.sum())
    return numbers


def _digests(tokens: Tokens, documents: int) -> bytes:
    """16 bytes for each example."""
    digests = bytearray()
    # a token and whether it is trained, as one number
    block = memoryview((tokens.ids * np.int32(2) + tokens.trained).tobytes())
    edges = [0, *(tokens.lengths.cumsum() * tokens.ids.itemsize).tolist()]
    for place in range(0, len(tokens), documents):
        # the ends say which tokens are of which document
        text = xxhash.xxh3_128(block[edges[place] : edges[place + documents]])
        if documents > 1:
            text.update(np.diff(edges[place : place + documents + 1]).tobytes())
        digests += text.digest()
    return bytes(digests)


def first_of_each(numbers: Numbers, order: Iterable[tuple[int, int]]) -> NDArray[np.bool_]:
    """Which examples are the first with their text when all are looked at: bool [examples].

    `order`: ranges of examples, the first, and the one after the last.
    """
    kept, seen = np.zeros(len(numbers), np.bool_), np.zeros(len(numbers), np.bool_)
    for start, end in order:
        for first in range(start, end, _EXAMPLES):
            found, places = np.unique(numbers[first : min(first + _EXAMPLES, end)], return_index=True)
            kept[first + places[~seen[found]]] = True
            seen[found] = True
    return kept


def in_both(numbers: Numbers, examples: Numbers, others: Numbers) -> int:
    """How many of the examples have a text that one of the others has."""
    seen = np.zeros(len(numbers), np.bool_)
    for first in range(0, len(others), _EXAMPLES):
        seen[numbers[others[first : first + _EXAMPLES]]] = True
    return int(seen[numbers[examples]].sum())
