"""Tokens and packings in files: read back as they were written, in groups and blocks of any size."""

from pathlib import Path

import numpy as np
import pytest

from hyperpod_ft.data.packing import pack
from hyperpod_ft.data.seq2seq.packing import pack_seq2seq
from hyperpod_ft.data.stored import packings as stored_packings
from hyperpod_ft.data.stored import token_stream
from hyperpod_ft.data.stored.packings import Parts, StoredPackings
from hyperpod_ft.data.stored.token_stream import StoredTokens, TokenStream
from hyperpod_ft.data.tokens import Tokens


def stored(directory: Path, lengths: np.ndarray, documents: int = 1) -> tuple[Tokens, StoredTokens]:
    """Tokens of which each is its place, written in chunks of 10 documents."""
    count = int(lengths.sum())
    tokens = Tokens(np.arange(count, dtype=np.int32), np.random.default_rng(0).random(count) < 0.5, lengths)
    stream, edges = TokenStream(directory, documents), np.concatenate([[0], lengths.cumsum()])
    for first in range(0, len(lengths), 10):
        own = slice(edges[first], edges[min(first + 10, len(lengths))])
        stream.add(Tokens(tokens.ids[own], tokens.trained[own], lengths[first : first + 10]))
    return tokens, stream.tokens()


@pytest.mark.parametrize("documents", [1, 2])
def test_tokens_are_read_back(tmp_path: Path, documents: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_stream, "_SPANS", 7)
    monkeypatch.setattr(token_stream, "_EXAMPLES", 9)
    tokens, found = stored(tmp_path, np.random.default_rng(1).integers(1, 30, 64), documents)
    blocks = list(found.blocks())
    assert len(blocks) > 1
    for name in ("ids", "trained", "lengths"):
        assert np.array_equal(np.concatenate([getattr(block, name) for block in blocks]), getattr(tokens, name))
    assert np.array_equal(found.label_tokens().ravel(), tokens.label_tokens)

    order = np.random.default_rng(2).permutation(64 // documents)
    numbers = (order[:, None] * documents + np.arange(documents)).ravel()
    own, edges = found.of(order), [*tokens.starts, len(tokens.ids)]
    places = np.concatenate([np.arange(edges[number], edges[number + 1]) for number in numbers])
    assert np.array_equal(own.ids, tokens.ids[places]) and np.array_equal(own.trained, tokens.trained[places])
    assert np.array_equal(own.lengths, tokens.lengths[numbers])


def spans(packed: Parts) -> list[tuple[int, ...]]:
    return [
        row
        for part in packed
        for row in zip(*(x.tolist() for x in (part.rows, part.starts, part.lengths)), strict=True)
    ]


@pytest.mark.parametrize("how", ["bfd", "none", "wrapped"])
def test_groups_follow_one_another(tmp_path: Path, how: str) -> None:
    lengths = np.random.default_rng(3).integers(1, 16, (90, 1))
    starts = lengths.cumsum()[:, None] - lengths
    groups = [
        (pack(how, starts[first : first + 40], lengths[first : first + 40], 32, 5, first // 40),)  # type: ignore[arg-type]
        for first in (0, 40, 80)
    ]
    written, before, expected = StoredPackings(tmp_path, pairs=False), 0, []
    for group in groups:
        written.add(group)
        expected += [(before + row, *span) for row, *span in spans(group)]
        before += group[0].row_count
    assert written.row_count == before
    found = [(first + row, *span) for first in range(before) for row, *span in spans(written.rows(first, first + 1))]
    assert found == expected == spans(written.rows(0, before))


def test_the_groups_of_a_split_are_shuffled_differently() -> None:
    lengths = np.full((40, 1), 10)
    first, again, second = ((pack("bfd", lengths.cumsum()[:, None], lengths, 16, 5, group),) for group in (0, 0, 1))
    assert spans(first) == spans(again) != spans(second)


@pytest.mark.parametrize("seq2seq", [False, True])
def test_rows_of_several_layouts_are_the_same_in_blocks_of_any_size(tmp_path: Path, *, seq2seq: bool) -> None:
    lengths = np.random.default_rng(4).integers(2, 16, 120)
    tokens, files = stored(tmp_path, lengths)
    packings = [StoredPackings(tmp_path, pairs=seq2seq) for _ in range(3)]
    for number, stop in enumerate((70, 70, 120)):  # the second has no rows
        own = slice([0, 70, 70][number], stop)
        if seq2seq:
            packings[number].add(pack_seq2seq("bfd", tokens.starts[own], lengths[own], lengths[own] // 2, (24, 12), 1))
        else:
            packings[number].add((pack("bfd", tokens.starts[own, None], lengths[own, None], 32, 1),))
    (whole,) = stored_packings.blocks(packings, 1000)
    found, before = [], 0
    for block in stored_packings.blocks(packings, 4):
        packed, near = stored_packings.in_memory(block, files)
        ids = [near.ids[start : start + length].tolist() for _, start, length in spans(packed)]
        assert ids == [list(range(start, start + length)) for _, start, length in spans(block)]
        found += [(before + row, *span) for row, *span in spans(block)]
        before += block[0].row_count
    assert sorted(found) == sorted(spans(whole)) and before == whole[0].row_count
