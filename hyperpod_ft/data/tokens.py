"""Documents as token ids, and which of them are trained."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_COUNTED_DOCUMENTS = 1 << 14  # at once, whose tokens fit in memory


@dataclass(frozen=True)
class Tokens:
    """Documents end to end; for an encoder-decoder, each is its source, then its target, whose tokens are the trained.

    ids: int32 [tokens]; trained: bool [tokens], whether the token counts in the loss; lengths: int64 [documents].
    """

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> NDArray[np.int64]:
        return self.lengths.cumsum() - self.lengths

    @property
    def label_tokens(self) -> NDArray[np.int64]:
        """How many tokens of each document are trained: int64 [documents]."""
        edges = np.concatenate([np.zeros(1, np.int64), self.lengths.cumsum()])
        counts = np.empty(len(self), np.int64)
        for first in range(0, len(self), _COUNTED_DOCUMENTS):
            inner = edges[first : first + _COUNTED_DOCUMENTS + 1]
            before = np.zeros(inner[-1] - inner[0] + 1, np.int64)
            np.cumsum(self.trained[inner[0] : inner[-1]], out=before[1:])
            counts[first : first + _COUNTED_DOCUMENTS] = np.diff(before[inner - inner[0]])
        return counts

    def cut(self, lengths: NDArray[np.int64]) -> "Tokens":
        """The first `lengths` tokens of each document; documents of length 0 are removed."""
        if np.array_equal(lengths, self.lengths) and lengths.all():
            return self
        kept = self.first(lengths)
        return Tokens(self.ids[kept], self.trained[kept], lengths[lengths > 0])

    def first(self, lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which tokens are the first `lengths` of each document: bool [tokens]."""
        within = np.arange(len(self.ids)) - np.repeat(self.starts, self.lengths)
        return np.asarray(within < np.repeat(lengths, self.lengths))

    def only(self, kept: NDArray[np.bool_]) -> "Tokens":
        """These tokens (bool [tokens]), at least one of each document."""
        if kept.all():
            return self
        return Tokens(self.ids[kept], self.trained[kept], np.add.reduceat(kept, self.starts, dtype=np.int64))
