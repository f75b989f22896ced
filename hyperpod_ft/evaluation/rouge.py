"""ROUGE, how much of an expected text an answer repeats: F1 of words, of pairs of words, and of the longest sequence of
words that both have in this order.

As rouge-score 0.1.2 computes it without stemming, for ASCII text; it takes other letters for spaces. A word is a
sequence of letters and digits with their marks, such as accents and vowel signs: a text without spaces between words,
as in Chinese or Thai, is one word up to each punctuation mark. The package is not used: there is no wheel of it, and it
imports NLTK, for seconds.
"""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from hyperpod_ft.runs.results.samples import Rouge


def mean(pairs: Sequence[tuple[str, str]]) -> Rouge:
    """The mean over pairs of an answer and what was expected; there is at least one."""
    found = [rouge(answer, expected) for answer, expected in pairs]
    return Rouge(
        rouge_1=sum(one.rouge_1 for one in found) / len(found),
        rouge_2=sum(one.rouge_2 for one in found) / len(found),
        rouge_l=sum(one.rouge_l for one in found) / len(found),
    )


def rouge(answer: str, expected: str) -> Rouge:
    one, other = _words(answer), _words(expected)
    pairs, wanted = Counter(pairwise(one)), Counter(pairwise(other))
    return Rouge(
        rouge_1=_f1((Counter(one) & Counter(other)).total(), len(one), len(other)),
        rouge_2=_f1((pairs & wanted).total(), pairs.total(), wanted.total()),
        rouge_l=_f1(_in_common(one, other), len(one), len(other)),
    )


def _words(text: str) -> list[str]:
    """Lowercase and in NFC, so that a letter is the same with its accent as a character of its own."""
    words = [""]
    for character in unicodedata.normalize("NFC", text.lower()):
        if character.isalnum() or (words[-1] and unicodedata.category(character).startswith("M")):
            words[-1] += character
        elif words[-1]:
            words.append("")
    return [word for word in words if word]


def _f1(common: int, one: int, other: int) -> float:
    return 2 * common / (one + other) if common else 0.0


def _in_common(one: Sequence[str], other: Sequence[str]) -> int:
    """Length of the longest common subsequence. The bits of `row` that are 0 mark where in `one` it has grown: all
    columns of a row of the usual table at once."""
    places: dict[str, int] = {}
    for place, word in enumerate(one):
        places[word] = places.get(word, 0) | 1 << place
    every = (1 << len(one)) - 1
    row = every
    for word in other:
        matches = row & places.get(word, 0)
        row = ((row + matches) | (row - matches)) & every
    return len(one) - row.bit_count()
