"""Whether BPE by a list of merges, as `tokenizers` does it, gives what BPE by ranks gives, as tiktoken does it.

By merges, a pair of neighbours is joined when it is listed, the first listed first. By ranks, it is joined when the two
together are a token, that of the lowest id first. Two kinds of lists come to the same:

- every way to cut any token in two is listed, in the order of ids. So transformers writes a tokenizer that was made
  for tiktoken, as Llama 3's. Whole words must be looked up first, as tiktoken does: some are never reached by merges.
- each token is listed once, in the order of ids: what a trainer leaves. Then a token has to be cut nowhere else. While
  no merge has crossed the ends of a stretch of text, what happens inside it depends on nothing outside; so the only
  pair that may ever stand where a token will be is the one that its text alone comes to, and that has to be the
  listed one. `_is_reached` follows the seam between the two backwards through their own merges to see that nothing
  would have crossed it (the compatibility of tokens in https://github.com/github/rust-gems, crate bpe).
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

_CUT_BITS = 16  # a cut is its token's id and a place in the token, in one integer


def merges_follow_ranks(
    vocabulary: Mapping[str, int], blocks: Iterable[Sequence[Sequence[str]]], *, whole_words: bool
) -> bool:
    """`vocabulary` has single characters, and what merges make of them; `blocks` have the pairs in order.

    Raises KeyError or ValueError for a pair that makes no token.
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
    # Of two neighbours the one of the higher id must be the one that was made later.
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
    """Whether the text of `left` and `right`, merged up to but without `token`, comes to these two."""
    limit = token
    while joined.get((left, right), limit) >= limit:
        later = max(left, right)
        if later not in parts:
            return True
        # Undo the later one, and look whether the seam would have been crossed before it was made. Where both are the
        # same token the left one was made first.
        if left > right:
            left, limit = parts[left][1], left
        else:
            right, limit = parts[right][0], right + 1
    return False
