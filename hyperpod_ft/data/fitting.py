"""Which examples fit `max_length`, and what is left of those that are cut."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.data.reading import BadRow
from hyperpod_ft.data.tokens import Tokens

TOO_LONG = "longer than max_length"
NOTHING_TO_LEARN = "no token to learn"


@dataclass(frozen=True)
class Fitted:
    """Examples and the lengths that they may have.

    within: bool [tokens], which tokens remain when each example is cut to its length; shortened: these tokens; the
    others bool [examples]: without a token to learn; dropped as too long; cut; cut, and no completion is left.
    """

    tokens: Tokens
    dataset: Dataset
    within: NDArray[np.bool_]
    shortened: Tokens
    nothing: NDArray[np.bool_]
    dropped: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    emptied: NDArray[np.bool_]

    @classmethod
    def of(cls, tokens: Tokens, dataset: Dataset) -> "Fitted":
        within, shape = _within(tokens, dataset), (-1, dataset.documents_per_example)
        shortened = tokens.only(within)
        nothing = dataset.has_answers & (tokens.label_tokens.reshape(shape) == 0).any(1)
        overlong = ~nothing & (shortened.lengths < tokens.lengths).reshape(shape).any(1)
        dropped = overlong & (dataset.overlong == "drop")
        truncated = overlong & ~dropped
        emptied = truncated & (shortened.label_tokens.reshape(shape) == 0).any(1)
        return cls(tokens, dataset, within, shortened, nothing, dropped, truncated, emptied)

    @property
    def kept(self) -> NDArray[np.bool_]:
        """Which examples are trained."""
        return np.asarray(~(self.nothing | self.dropped | self.emptied))

    @property
    def left(self) -> Tokens:
        """The documents of the examples that are trained, as they are trained."""
        lengths = self.shortened.lengths.reshape(-1, self.dataset.documents_per_example)
        return self.shortened.cut(np.where(self.kept[:, None], lengths, 0).ravel())

    def why_unusable(self, example: int, where: str) -> BadRow:
        """The bad row of an example with nothing to learn, or one that is dropped."""
        length = int(self.tokens.lengths.reshape(-1, self.dataset.documents_per_example)[example].sum())
        if self.dropped[example]:
            return BadRow(where, TOO_LONG, _too_long(length, self.tokens.label_tokens[example], self.dataset))
        return BadRow(where, NOTHING_TO_LEARN, f"{length} tokens")


def _within(tokens: Tokens, dataset: Dataset) -> NDArray[np.bool_]:
    """Which tokens remain of examples that are cut to the length that each may have."""
    lengths = tokens.lengths
    if dataset.packing == "wrapped":
        return np.ones(len(tokens.ids), np.bool_)
    if dataset.max_target_length is not None:
        longest = dataset.max_length, dataset.max_target_length
        return kept_tokens(tokens.trained, lengths, tokens.label_tokens, longest)
    fitting = _cut_to_fit(lengths.reshape(-1, dataset.documents_per_example), dataset.max_length).ravel()
    return tokens.first(fitting)


def _cut_to_fit(documents: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """Lengths of documents, int64 [examples, documents], cut so that those of an example have `limit` in sum.

    Of two, the longer one is cut first.
    """
    if documents.shape[1] == 1:
        return np.minimum(documents, limit)
    first, second = documents.T
    first = np.minimum(first, np.maximum(limit - second, limit // 2))
    return np.stack([first, np.minimum(second, limit - first)], axis=1)


def _too_long(length: int, target: int, dataset: Dataset) -> str:
    """Describes an example of that many tokens; `target`: those of the target, for an encoder-decoder."""
    if dataset.max_target_length is None:
        return f"{length} tokens, dataset.max_length is {dataset.max_length}"
    return (
        f"{length - target} tokens of source and {target} of target, dataset.max_length is {dataset.max_length} and"
        f" max_target_length {dataset.max_target_length}"
    )


def kept_tokens(
    is_target: NDArray[np.bool_], lengths: NDArray[np.int64], targets: NDArray[np.int64], longest: tuple[int, int]
) -> NDArray[np.bool_]:
    """Which tokens remain, bool [tokens], of pairs that lie end to end, each its source and then its target.

    is_target: bool [tokens]; lengths, targets: int64 [pairs], tokens of each pair and of its target. `longest`: of
    sources and of targets, in tokens. A source keeps its first tokens and its EOS, which the encoder always reads; a
    target its first tokens, and so no EOS, which would teach the model to stop there.
    """
    sources = np.repeat(lengths - targets, lengths)
    within = np.arange(len(is_target)) - np.repeat(lengths.cumsum() - lengths, lengths)
    of_source = (within < longest[0] - 1) | (within == sources - 1)
    return np.where(is_target, within - sources < longest[1], of_source)
