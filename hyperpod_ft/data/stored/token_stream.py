"""The tokens of all examples, in unnamed files, so that they need not fit in memory."""

from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyperpod_ft.data.mixing.mixture import Numbers
from hyperpod_ft.data.stored.spool import Spool
from hyperpod_ft.data.tokens import Tokens

Integers = NDArray[np.int64]

_EXAMPLES = 1 << 14  # at once, whose tokens fit in memory
# Read between two releases of the files' pages: the system maps 64 KB around each.
_SPANS = 1 << 10


class TokenStream:
    """Tokens appended chunk by chunk; each example is as many documents as `documents`."""

    def __init__(self, directory: Path, documents: int) -> None:
        """The files use space in `directory` until the process ends."""
        self.directory, self.documents = directory, documents
        self._ids, self._trained = Spool(directory, np.int32), Spool(directory, np.bool_)
        self._lengths, self._label_tokens = Spool(directory, np.int32), Spool(directory, np.int32)
        self.desirable = Spool(directory, np.bool_)
        """The label of each example of format `unpaired-preference`."""

    def add(self, tokens: Tokens) -> None:
        self._ids.append(tokens.ids)
        self._trained.append(tokens.trained)
        self._lengths.append(tokens.lengths)
        self._label_tokens.append(tokens.label_tokens)

    def tokens(self) -> "StoredTokens":
        """All tokens; there must be at least one."""
        return StoredTokens(self._ids, self._trained, self._lengths, self._label_tokens, self.documents)


class StoredTokens:
    """The documents of all examples end to end. In memory is only where each begins, in 4 bytes if these suffice."""

    def __init__(
        self,
        ids: Spool[np.int32],
        trained: Spool[np.bool_],
        lengths: Spool[np.int32],
        label_tokens: Spool[np.int32],
        documents: int,
    ) -> None:
        self._ids, self._trained = ids.mapped(), trained.mapped()
        self._label_tokens, self._documents = label_tokens, documents
        small = len(ids) <= np.iinfo(np.uint32).max
        self._edges = np.zeros(len(lengths) + 1, np.uint32 if small else np.int64)
        before = 0
        for first in range(0, len(lengths), _EXAMPLES):
            ends = before + lengths.read(first, min(first + _EXAMPLES, len(lengths))).cumsum(dtype=np.int64)
            self._edges[first + 1 : first + 1 + len(ends)] = ends
            before = int(ends[-1])

    def spans(self, examples: Numbers) -> tuple[Integers, Integers]:
        """Where the documents of examples begin, and their lengths: each int64 [examples, documents]."""
        numbers = np.multiply(examples, self._documents, dtype=np.int64)[:, None] + np.arange(self._documents)
        starts = self._edges[numbers].astype(np.int64)
        return starts, self._edges[numbers + 1].astype(np.int64) - starts

    def label_tokens(self) -> NDArray[np.int32]:
        """How many tokens of each document are trained: [examples, documents]."""
        return self._label_tokens.read(0, len(self._label_tokens)).reshape(-1, self._documents)

    def occurrences(self, tokens: Collection[int]) -> list[int]:
        """How often each of these tokens is in the documents."""
        found = np.zeros(len(tokens), np.int64)
        for block in self.blocks():
            found += [np.count_nonzero(block.ids == token) for token in tokens]
        return [int(count) for count in found]

    def copied(self, starts: Integers, lengths: Integers) -> Tokens:
        """The tokens of these spans, end to end."""
        total = int(lengths.sum())
        found = Tokens(np.empty(total, np.int32), np.empty(total, np.bool_), lengths)
        targets = found.starts
        order = np.argsort(starts, kind="stable")  # as they lie in the files
        for first in range(0, len(order), _SPANS):
            part = order[first : first + _SPANS]
            here, there = _ranges(starts[part], lengths[part]), _ranges(targets[part], lengths[part])
            found.ids[there] = self._ids.numbers[here]
            found.trained[there] = self._trained.numbers[here]
            self._ids.release()
            self._trained.release()
        return found

    def of(self, examples: Numbers) -> Tokens:
        """The documents of these examples."""
        starts, lengths = self.spans(examples)
        return self.copied(starts.ravel(), lengths.ravel())

    def blocks(self) -> Iterator[Tokens]:
        """All documents, whole examples at once."""
        count = (len(self._edges) - 1) // self._documents
        for first in range(0, count, _EXAMPLES):
            yield self.of(np.arange(first, min(first + _EXAMPLES, count)))


def _ranges(starts: Integers, lengths: Integers) -> Integers:
    """The numbers of all ranges, one range after the other."""
    return np.arange(lengths.sum()) + np.repeat(starts - (lengths.cumsum() - lengths), lengths)
