"""Packing, over many random sets of lengths: every token once, rows exactly full or padded, examples whole."""

import time
from itertools import pairwise
from typing import Literal

import numpy as np
import pytest

from hyperpod_ft.data.best_fit import best_fit
from hyperpod_ft.data.packing import IGNORED, PackedRows, fill, pack

How = Literal["bfd", "wrapped", "none"]
PAD = 7


def packed(how: How, lengths: list[int], max_length: int, seed: int = 0) -> tuple[PackedRows, np.ndarray, np.ndarray]:
    """Rows over a stream whose ids are 1000, 1001, ...: each token is unique. Also the stream's masks and order."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = np.arange(1000, 1000 + starts[-1], dtype=np.int32)
    trained = np.random.default_rng(seed).random(len(ids)) < 0.5
    order = np.random.default_rng(seed + 1).permutation(len(lengths))
    layout = pack(how, starts[order, None], np.diff(starts)[order, None], max_length, seed)
    # in two blocks, as the stage writes
    middle = layout.row_count // 2
    blocks = [
        fill(layout, ids, trained, first, stop, max_length, PAD)
        for first, stop in ((0, middle), (middle, layout.row_count))
        if stop > first
    ]
    rows = PackedRows(
        *(np.concatenate([getattr(b, name) for b in blocks]) for name in ("input_ids", "labels", "position_ids"))
    )
    return rows, trained, order


def documents(rows: PackedRows) -> list[list[int]]:
    """The spans between restarts of position_ids, padding left out."""
    found = []
    for ids, positions in zip(rows.input_ids.tolist(), rows.position_ids.tolist(), strict=True):
        edges = [column for column, position in enumerate(positions) if position == 0] + [len(ids)]
        spans = [ids[first:stop] for first, stop in pairwise(edges)]
        found += [span for span in spans if span[0] != PAD]
    return found


CASES = [(seed, max_length) for seed in range(12) for max_length in (8, 33, 64)]


@pytest.mark.parametrize("how", ["bfd", "wrapped", "none"])
@pytest.mark.parametrize(("seed", "max_length"), CASES)
def test_invariants(how: How, seed: int, max_length: int) -> None:
    generator = np.random.default_rng(seed)
    longest = 3 * max_length if how == "wrapped" else max_length
    lengths = generator.integers(1, longest, size=int(generator.integers(1, 120)), endpoint=True).tolist()
    rows, trained, order = packed(how, lengths, max_length, seed)
    starts = np.cumsum([0, *lengths])
    stream = [list(range(1000 + starts[i], 1000 + starts[i + 1])) for i in range(len(lengths))]
    spans = documents(rows)

    assert rows.input_ids.shape == rows.labels.shape == rows.position_ids.shape
    assert rows.input_ids.shape[1] == max_length
    assert all(array.dtype == np.int32 for array in (rows.input_ids, rows.labels, rows.position_ids))
    assert sorted(token for span in spans for token in span) == sorted(t for document in stream for t in document)
    real = rows.input_ids >= 1000
    assert real[:, 0].all(), "no row of padding only"
    assert (rows.labels[~real] == IGNORED).all()
    expected = np.where(trained[rows.input_ids[real] - 1000], rows.input_ids[real], IGNORED)
    assert (rows.labels[real] == expected).all()
    for row, filled in zip(rows.position_ids, real.sum(axis=1), strict=True):
        assert row[filled:].tolist() == list(range(max_length - filled)), "padding restarts at 0"
        assert real.shape[1] == max_length
    if how == "wrapped":
        flat = [token for span in spans for token in span]
        assert flat == [token for i in order for token in stream[i]], "one stream, in order"
        assert real[:-1].all(), "only the last row is padded"
    else:
        assert sorted(spans) == sorted(stream), "examples are whole"
    if how == "none":
        assert spans == [stream[i] for i in order]
    if how == "bfd":
        assert len(rows.input_ids) <= 11 / 9 * -(-sum(lengths) // max_length) * 2, "far from one a row"


def lower_bound(lengths: np.ndarray, capacity: int) -> int:
    return -(-int(lengths.sum()) // capacity)


def short_examples(count: int) -> np.ndarray:
    """Lengths as of school questions with answers: 164 tokens on average, 50 to 470."""
    drawn = np.random.default_rng(count).lognormal(5.03, 0.38, count)
    return drawn.astype(np.int64).clip(50, 470)


@pytest.mark.parametrize("seed", range(40))
def test_best_fit_places_each_item_once_and_overfills_no_bin(seed: int) -> None:
    generator = np.random.default_rng(seed)
    capacity = int(generator.integers(1, 400))
    longest = int(generator.integers(1, capacity, endpoint=True))
    lengths = generator.integers(1, longest, size=int(generator.integers(0, 600)), endpoint=True)
    bins = best_fit(lengths, capacity)
    assert bins.shape == lengths.shape
    count = int(bins.max(initial=-1)) + 1
    used = np.bincount(bins, weights=lengths, minlength=count)
    assert (used <= capacity).all()
    assert (used > 0).all(), "no bin is empty"
    assert (best_fit(lengths, capacity) == bins).all()
    # any two bins would overfill one: twice the least possible number, at worst
    assert count <= max(1, 2 * lower_bound(lengths, capacity))


@pytest.mark.parametrize("count", [3_000, 7_473, 50_000])
@pytest.mark.parametrize("max_length", [1024, 2048, 8192])
def test_best_fit_leaves_next_to_nothing_unfilled(count: int, max_length: int) -> None:
    lengths = short_examples(count)
    rows = int(best_fit(lengths, max_length).max()) + 1
    least = lower_bound(lengths, max_length)
    # the last row is always partly filled
    assert rows <= least + 0.002 * rows, f"{rows} rows, {least} at least"


def test_best_fit_finds_exact_pairs_and_triples() -> None:
    assert best_fit(np.array([60, 40, 55, 45]), 100).tolist() == [0, 0, 1, 1]
    # best-fit decreasing takes three bins: 5 4, 3 3 3, 2
    assert best_fit(np.array([5, 4, 3, 3, 3, 2]), 10).tolist() == [0, 1, 0, 1, 1, 0]
    assert best_fit(np.array([50, 50, 50]), 100).tolist() == [0, 0, 1]
    assert best_fit(np.array([100, 100, 1]), 100).tolist() == [0, 1, 2]


def test_the_seed_decides_the_order() -> None:
    lengths = np.random.default_rng(0).integers(1, 30, size=60).tolist()
    for how in ("bfd", "wrapped", "none"):
        first, again, other = (packed(how, lengths, 32, seed)[0].input_ids for seed in (3, 3, 4))
        assert (first == again).all()
        assert first.shape != other.shape or (first != other).any()


def test_no_example_at_all() -> None:
    nothing = np.empty((0, 1), np.int64)
    for how in ("bfd", "wrapped", "none"):
        assert pack(how, nothing, nothing, 8, 0).row_count == 0


@pytest.mark.parametrize(
    "lengths",
    [
        np.random.default_rng(1).integers(1, 2048, size=100_000),
        short_examples(100_000),
        np.full(100_000, 700),  # nothing is ever filled exactly
    ],
)
def test_packing_is_fast(lengths: np.ndarray) -> None:
    started = time.process_time()
    best_fit(lengths, 2048)
    assert time.process_time() - started < 5, "it takes a twentieth of that; the slack is for a busy machine"
