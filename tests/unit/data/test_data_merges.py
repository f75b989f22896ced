"""BPE by merges and by ranks, written out plainly, against what `merges_follow_ranks` says of them."""

import itertools
from itertools import pairwise

import numpy as np
import pytest

from hyperpod_ft.data.byte_level.merge_order import merges_follow_ranks

Merges = list[list[str]]
ALPHABET = "ab"
TEXTS = ["".join(letters) for length in range(1, 9) for letters in itertools.product(ALPHABET, repeat=length)]


def joined_by(priority: dict[tuple[str, str], int], text: str) -> list[str]:
    """Repeatedly merge the first pair of the lowest priority."""
    pieces = list(text)
    while found := [(priority[pair], place) for place, pair in enumerate(pairwise(pieces)) if pair in priority]:
        _, place = min(found)
        pieces[place : place + 2] = ["".join(pieces[place : place + 2])]
    return pieces


def by_merges(merges: Merges, text: str) -> list[str]:
    return joined_by({(left, right): number for number, (left, right) in enumerate(merges)}, text)


def by_ranks(vocabulary: dict[str, int], text: str) -> list[str]:
    return joined_by({cut: number for token, number in vocabulary.items() for cut in cuts(token)}, text)


def cuts(token: str) -> list[tuple[str, str]]:
    return [(token[:place], token[place:]) for place in range(1, len(token))]


def a_list_of_merges(seed: int) -> tuple[dict[str, int], Merges]:
    """Each token is merged once, from two earlier ones chosen at random, so that some are never reached."""
    generator = np.random.default_rng(seed)
    vocabulary = {letter: number for number, letter in enumerate(ALPHABET)}
    merges: Merges = []
    for _ in range(int(generator.integers(1, 9))):
        left, right = (str(part) for part in generator.choice(list(vocabulary), 2))
        if len(left + right) <= 6 and left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            merges.append([left, right])
    return vocabulary, merges


def test_a_trainers_merges() -> None:
    kept = 0
    for seed in range(1500):
        vocabulary, merges = a_list_of_merges(seed)
        same = merges_follow_ranks(vocabulary, [merges[:2], merges[2:]], whole_words=False)
        assert same == all(by_merges(merges, token) == [token] for token in vocabulary), (merges, seed)
        if same and merges:
            kept += 1
            if kept <= 100:
                assert all(by_merges(merges, text) == by_ranks(vocabulary, text) for text in TEXTS), merges
    assert 200 < kept < 1400, "both kinds are there"


def test_every_cut_of_any_tokens() -> None:
    for seed in range(40):
        generator = np.random.default_rng(seed)
        tokens = [text for text in TEXTS if 1 < len(text) <= 5]
        generator.shuffle(tokens)  # ids in no order of length, so that some are never reached
        vocabulary = {text: number for number, text in enumerate([*ALPHABET, *tokens[:12]])}
        merges = [
            list(cut) for token in vocabulary for cut in cuts(token) if cut[0] in vocabulary and cut[1] in vocabulary
        ]
        assert merges_follow_ranks(vocabulary, [merges], whole_words=True)
        assert all(by_merges(merges, text) == by_ranks(vocabulary, text) for text in TEXTS[:200]), merges


def test_lists_that_are_not_the_same() -> None:
    vocabulary = {token: number for number, token in enumerate(["a", "b", "c", "ab", "bc", "abc"])}
    every = [["a", "b"], ["b", "c"], ["a", "bc"], ["ab", "c"]]
    assert merges_follow_ranks(vocabulary, [every], whole_words=True)
    assert not merges_follow_ranks(vocabulary, [every], whole_words=False)
    assert not merges_follow_ranks(vocabulary, [[every[1], every[0], *every[2:]]], whole_words=True), "another order"
    assert not merges_follow_ranks(vocabulary, [[*every, every[3]]], whole_words=True), "one twice"
    once = [["a", "b"], ["b", "c"], ["ab", "c"]]
    assert merges_follow_ranks(vocabulary, [once], whole_words=False)
    assert not merges_follow_ranks(vocabulary, [[*once[:2], ["a", "bc"]]], whole_words=False), "ab is joined first"
    assert not merges_follow_ranks(vocabulary, [once[:2]], whole_words=False), "abc is never made"
    with pytest.raises(KeyError):
        merges_follow_ranks(vocabulary, [[["c", "a"]]], whole_words=True)
