"""Which examples have the same text."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperpod_ft.data.mixing import duplicates
from hyperpod_ft.data.tokens import Tokens

TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=40)


def tokens(documents: list[list[int]]) -> Tokens:
    ids = np.array([token for document in documents for token in document], np.int32)
    return Tokens(ids, np.ones(len(ids), np.bool_), np.array([len(document) for document in documents], np.int64))


@settings(deadline=None)
@given(documents=TEXTS, block=st.integers(1, 50))
def test_equal_texts_have_equal_numbers(documents: list[list[int]], block: int) -> None:
    blocks = (tokens(documents[first : first + block]) for first in range(0, len(documents), block))
    numbers = duplicates.texts(blocks, 1)
    same = [[one == other for other in documents] for one in documents]
    assert (numbers[:, None] == numbers).tolist() == same


def test_both_documents_of_a_preference_count() -> None:
    numbers = duplicates.texts([tokens([[1, 2], [3], [1], [2, 3], [1, 2], [3]])], 2)
    assert numbers[0] == numbers[2] != numbers[1]


def test_the_first_in_the_given_order_is_kept() -> None:
    numbers = np.array([0, 1, 0, 2, 1], np.int64)
    assert duplicates.first_of_each(numbers, [(0, 5)]).tolist() == [True, True, False, True, False]
    assert duplicates.first_of_each(numbers, [(3, 5), (0, 3)]).tolist() == [True, False, False, True, True]
