"""Which tokens of too long pairs remain."""

import numpy as np
from numpy.typing import NDArray


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
