"""Whether BPE by a list of merges (`tokenizers`) gives the same tokens as BPE by ranks (tiktoken).

By merges, a pair of neighbours is joined if it is in the list, the first in the list first. By ranks, it is joined if
the two together are a token, the one of the lowest id first. For two kinds of lists the results are the same:

- every way to split each token in two is listed, in the order of ids. transformers writes tokenizers made for tiktoken
  this way, such as Llama 3's. Whole words must be looked up first, as tiktoken does: merges never produce some of them.
- each token is listed once, in the order of ids, as a BPE trainer writes them. As long as no merge has crossed the ends
  of a stretch of text, the merges inside it do not depend on the text outside. So a token can only be made from the
  pair that its text alone is merged to, and that must be the listed pair. `_is_reached` follows the seam between the
  two backwards through their own merges to check that no merge would have crossed it earlier (the compatibility of
  tokens in https://github.com/github/rust-gems, crate bpe).
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

_CUT_BITS = 16  # a cut is a token's id and a position in the token, in one integer


def merges_follow_ranks(
    vocabulary: Mapping[str, int], blocks: Iterable[Sequence[Sequence[str]]], *, whole_words: bool
) -> bool:
    """`vocabulary` has the single characters and the tokens merged from them; `blocks` has the pairs in order.

    Raises KeyError or ValueError for a pair that is not a token.
    """
    cuts: list[int] = []
    for block in blocks:
        cuts += [(vocabulary[left + right] << _CUT_BITS) + len(left) for left, right in block]
    made = [token for token in vocabulary if len(token) > 1]
    return _each_once(vocabulary, made, cuts) or (whole_words and _every_cut(vocabulary, made, cuts))


def _every_cut(vocabulary: Mapping[str, int], made: Sequence[str], cuts: Sequence[int]) -> bool:
    possible = [
        (vocabulary[token] << _CUT_BITS) + place
        for token in made
        for place in range(1, len(token))
        if token[:place] in vocabulary and token[place:] in vocabulary
    ]
    listed = np.array(cuts, np.int64)
    in_order = bool((np.diff(listed >> _CUT_BITS) >= 0).all())
    return in_order and np.array_equal(np.sort(listed), np.sort(np.array(possible, np.int64)))


def _each_once(vocabulary: Mapping[str, int], made: Sequence[str], cuts: Sequence[int]) -> bool:
    if len(cuts) != len(made) or any(one >> _CUT_BITS >= next_ >> _CUT_BITS for one, next_ in pairwise(cuts)):
        return False
    places = {cut >> _CUT_BITS: cut & ((1 << _CUT_BITS) - 1) for cut in cuts}
    parts: dict[int, tuple[int, int]] = {}
    for token in made:
        number = vocabulary[token]
        place = places[number]
        parts[number] = (vocabulary[token[:place]], vocabulary[token[place:]])
    joined = {pair: number for number, pair in parts.items()}
    characters = [number for token, number in vocabulary.items() if len(token) == 1]
    # Of two neighbours, the one with the higher id must be the one merged later.
    if parts and (max(characters) > min(parts) or any(max(pair) >= number for number, pair in parts.items())):
        return False
    return all(_is_reached(number, *pair, parts, joined) for number, pair in parts.items())


def _is_reached(
    token: int,
    left: int,
    right: int,
    parts: Mapping[int, tuple[int, int]],
    joined: Mapping[tuple[int, int], int],
) -> bool:
    """Whether the text of `left` and `right` is merged to these two before `token` is merged."""
    limit = token
    while joined.get((left, right), limit) >= limit:
        later = max(left, right)
        if later not in parts:
            return True
        # Undo the later merge, and check whether the seam would have been crossed before it. If both are the same
        # token, the left one was merged first.
        if left > right:
            left, limit = parts[left][1], left
        else:
            right, limit = parts[right][0], right + 1
    return False
