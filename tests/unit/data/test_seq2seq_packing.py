"""Pairs of source and target: tokens, what is cut, and rows in which every pair is whole, once, on both sides."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.data.encoder import Encoder
from hyperpod_ft.data.fitting import TOO_LONG
from hyperpod_ft.data.reading import chunks
from hyperpod_ft.data.seq2seq.packing import Seq2SeqRows, fill_seq2seq, pack_seq2seq
from hyperpod_ft.data.text.example import Example
from hyperpod_ft.data.text.formats import examples
from hyperpod_ft.data.tokenization import TokenizedChunk, tokenize, tokenize_chunk
from hyperpod_ft.data.tokenizer import encode, source_ids
from tests.unit.tiny_tokenizer import make

TOKENIZER: Any = make()
EOS = TOKENIZER.eos_token_id
PAD, START = 7, 3


def render(config: Dataset, row: dict[str, Any], tokenizer: Any) -> Example:
    ((found,),) = examples(config, row, tokenizer)
    return found


def dataset(**values: Any) -> Dataset:
    given = {"source": "./rows.jsonl", "format": "prompt-completion", "max_length": 16, "max_target_length": 8}
    return Dataset(**(given | values))


def ids(text: str) -> list[int]:
    return encode(TOKENIZER.backend_tokenizer, [text])[0]


def test_source_and_target_end_with_eos_and_have_no_bos() -> None:
    config = dataset()
    rows = [{"prompt": "the quick", "completion": "fox"}, {"prompt": "a", "completion": "b"}]
    examples = [render(config, row, None) for row in rows]
    tokens = tokenize(examples, config, Encoder.of(TOKENIZER))
    source, target = ids("the quick"), ids("fox")
    expected = [[*source, EOS, *target, EOS], [*ids("a"), EOS, *ids("b"), EOS]]
    found = np.split(tokens.ids, tokens.lengths.cumsum()[:-1])
    assert [part.tolist() for part in found] == expected
    assert tokens.label_tokens.tolist() == [len(target) + 1, 2]
    assert tokens.trained[: tokens.lengths[0]].tolist() == [False] * (len(source) + 1) + [True] * (len(target) + 1)
    assert source_ids(TOKENIZER, "the quick") == expected[0][: len(source) + 1]


def test_a_pair_without_a_source_is_a_bad_row(tmp_path: Path) -> None:
    found = tokenized(tmp_path, [SHORT, {"prompt": " ", "completion": "fox"}])
    assert found.counts.bad == {"empty prompt": 1} and found.origins[:, 0].tolist() == [0]
    assert str(found.counts.listed[0]) == "rows.jsonl:2 (empty prompt: an encoder-decoder needs a source)"


def tokenized(directory: Path, rows: list[dict[str, str]], **values: Any) -> TokenizedChunk:
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (only,) = chunks(directory)
    return tokenize_chunk(directory, only, dataset(**values), Encoder.of(TOKENIZER))


LONG_SOURCE = {"prompt": "abcdefghijklmnopqrstuvwxyz", "completion": "xy"}
LONG_TARGET = {"prompt": "xy", "completion": "abcdefghijklmn"}
SHORT = {"prompt": "xyz", "completion": "zyx"}


def test_what_is_too_long_is_cut_on_its_side(tmp_path: Path) -> None:
    found = tokenized(tmp_path, [SHORT, LONG_SOURCE, LONG_TARGET], overlong="truncate")
    assert (found.counts.rows_read, found.counts.truncated, found.counts.emptied, found.counts.bad.total()) == (
        3,
        2,
        0,
        0,
    )
    first, second, third = np.split(found.tokens.ids, found.tokens.lengths.cumsum()[:-1])
    assert first.tolist() == [*ids("xyz"), EOS, *ids("zyx"), EOS]
    # a source keeps its EOS, a target does not: the model must not learn to stop there
    assert second.tolist() == [*ids(LONG_SOURCE["prompt"])[:15], EOS, *ids("xy"), EOS]
    assert third.tolist() == [*ids("xy"), EOS, *ids(LONG_TARGET["completion"])[:8]]
    assert found.tokens.label_tokens.tolist() == [len(ids("zyx")) + 1, len(ids("xy")) + 1, 8]


def test_what_is_too_long_is_dropped_with_both_lengths(tmp_path: Path) -> None:
    found = tokenized(tmp_path, [LONG_SOURCE, SHORT, LONG_TARGET])
    assert found.counts.bad == {TOO_LONG: 2} and found.origins[:, 0].tolist() == [1]
    assert len(found.tokens) == 1 and found.tokens.lengths.tolist() == [len(ids("xyz")) + len(ids("zyx")) + 2]
    first, last = (row.detail for row in found.counts.listed)
    assert "27 tokens of source" in first and "max_length is 16" in first
    assert "15 of target" in last and "max_target_length 8" in last


def packed(how: Any, seed: int, pairs: int, widths: tuple[int, int]) -> tuple[Seq2SeqRows, list[tuple[list[int], ...]]]:
    """Rows over a stream whose ids are 1000, 1001, ...: each token is unique. Also the pairs."""
    random = np.random.default_rng(seed)
    sources, targets = (random.integers(1, width, pairs, endpoint=True) for width in widths)
    lengths = sources + targets
    starts = lengths.cumsum() - lengths
    order = random.permutation(pairs)
    layout = pack_seq2seq(how, starts[order], lengths[order], targets[order], widths, seed)
    stream = np.arange(1000, 1000 + lengths.sum(), dtype=np.int32)
    middle = layout[0].row_count // 2
    blocks = [
        fill_seq2seq(layout, stream, first, stop, widths, PAD, START)
        for first, stop in ((0, middle), (middle, layout[0].row_count))
        if stop > first
    ]
    rows = Seq2SeqRows(**{name: np.concatenate([getattr(block, name) for block in blocks]) for name in vars(blocks[0])})
    ends = np.stack([starts, starts + sources, starts + lengths], 1) + 1000
    return rows, [(list(range(a, b)), list(range(b, c))) for a, b, c in ends.tolist()]


@pytest.mark.parametrize("how", ["bfd", "none"])
@pytest.mark.parametrize("seed", range(8))
def test_every_pair_is_in_one_row_whole(how: str, seed: int) -> None:
    rows, pairs = packed(how, seed, 1 + 37 * seed, (24, 10))
    found = []
    for row in range(len(rows.labels)):
        numbers = rows.decoder_documents[row]
        assert set(numbers) - {0} == set(rows.documents[row]) - {0} == set(range(1, numbers.max() + 1))
        assert how == "bfd" or numbers.max() == 1
        for number in range(1, numbers.max() + 1):
            target = rows.labels[row][numbers == number].tolist()
            found.append((rows.input_ids[row][rows.documents[row] == number].tolist(), target))
            assert rows.decoder_input_ids[row][numbers == number].tolist() == [START, *target[:-1]]
    assert sorted(found) == sorted(pairs)
    padding = rows.decoder_documents == 0
    assert (rows.labels[padding] == -100).all() and (rows.decoder_input_ids[padding] == PAD).all()
    assert (rows.input_ids[rows.documents == 0] == PAD).all()


def test_packing_depends_on_its_arguments_only_and_leaves_little_padding() -> None:
    widths = (256, 96)
    random = np.random.default_rng(0)
    # independent lengths, so that a row may be full on one side
    sources = random.geometric(1 / 40, 6000).clip(1, widths[0])
    targets = random.geometric(1 / 15, 6000).clip(1, widths[1])
    lengths, order = sources + targets, random.permutation(6000)
    arguments = ((lengths.cumsum() - lengths)[order], lengths[order], targets[order], widths)
    one, again = pack_seq2seq("bfd", *arguments, 5), pack_seq2seq("bfd", *arguments, 5)
    assert np.array_equal(one[0].starts, again[0].starts) and one[0].row_count == again[0].row_count
    bound = max(sources.sum() / widths[0], targets.sum() / widths[1])
    assert one[0].row_count <= 1.04 * bound + 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"format": "chat"}, "format chat"),
        ({"format": "text"}, "format text"),
        ({"loss_on": "all"}, "loss_on all"),
        ({"packing": "wrapped"}, "packing wrapped"),
    ],
)
def test_what_does_not_suit_an_encoder_decoder_is_refused(changes: dict[str, str], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        dataset(**changes)
