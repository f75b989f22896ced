"""Examples with the same text: the same tokens, of which the same are trained."""

import numpy as np
import xxhash
from numpy.typing import NDArray

from hyperpod_ft.data.tokenization import Tokens

_DOCUMENTS = 1 << 16  # at once


def texts(tokens: Tokens, documents: int) -> NDArray[np.int64]:
    """The number of each example's text, int64 [examples]: equal for equal texts; `documents` of each example.

    Texts are compared by a digest of 128 bits, the memory is a few dozen bytes an example.
    """
    found = _digests(tokens, documents)
    order = np.lexsort((found[:, 0], found[:, 1]))
    following = found[order]
    new = np.ones(len(order), np.bool_)
    new[1:] = (following[1:] != following[:-1]).any(1)
    numbers = np.empty(len(order), np.int64)
    numbers[order] = new.cumsum() - 1
    return numbers


def _digests(tokens: Tokens, documents: int) -> NDArray[np.uint64]:
    """uint64 [examples, 2]."""
    digests = bytearray()
    ends = tokens.lengths.cumsum()
    step = _DOCUMENTS // documents * documents
    for first in range(0, len(ends), step):
        stops = ends[first : first + step]
        begin = int(ends[first - 1]) if first else 0
        # a token and whether it is trained, as one number
        marked = tokens.ids[begin : int(stops[-1])] * np.int32(2) + tokens.trained[begin : int(stops[-1])]
        block = memoryview(marked.tobytes())
        edges = [0, *((stops - begin) * tokens.ids.itemsize).tolist()]
        for place in range(0, len(stops), documents):
            # the ends say which tokens are of which document
            text = xxhash.xxh3_128(block[edges[place] : edges[place + documents]])
            if documents > 1:
                text.update(np.diff(edges[place : place + documents + 1]).tobytes())
            digests += text.digest()
    return np.frombuffer(digests, np.uint64).reshape(-1, 2)


def first_of_each(numbers: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which examples are the first with their text when all are looked at in this order: bool [examples]."""
    kept = np.zeros(len(numbers), np.bool_)
    kept[order[np.unique(numbers[order], return_index=True)[1]]] = True
    return kept
