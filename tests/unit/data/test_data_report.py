"""How the lengths of documents are counted."""

from collections import Counter

import numpy as np

from hyperpod_ft.data.report import Lengths


def test_every_document_is_in_one_bin() -> None:
    lengths = np.array([1, 7, 8, 8, 399, 400], np.int64)
    counted = Lengths.of(Counter(lengths.tolist()))
    assert (counted.longest, counted.median, counted.mean) == (400, 8.0, 137.17)
    assert sum(counted.counts) == 6
    edges = np.arange(len(counted.counts) + 1) * counted.bin_width
    assert list(counted.counts) == np.histogram(lengths, edges)[0].tolist()
    assert len(counted.counts) <= 41


def test_documents_of_one_token() -> None:
    assert Lengths.of({1: 2}).counts == (0, 2)
