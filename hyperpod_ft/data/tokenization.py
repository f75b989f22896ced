"""Rows of one chunk to token arrays: parse, render, tokenize, and account for every row."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyperpod_ft.config import Dataset
from hyperpod_ft.data import formats, reading
from hyperpod_ft.data.example import Example, RowError
from hyperpod_ft.data.reading import BadRow, Chunk, Row
from hyperpod_ft.data.tokenizer import Tokenizer, bos_ids, encode

TOO_LONG = "longer than max_length"
NOTHING_TO_LEARN = "no token to learn"
# Bad rows kept with their line from each chunk; all are counted.
LISTED_PER_CHUNK = 50


@dataclass(frozen=True)
class Tokens:
    """Examples end to end. `starts[i]:starts[i + 1]` is example i.

    ids: int32 [tokens]; trained: bool [tokens], whether the loss is on the token; starts: int64 [examples + 1].
    """

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.starts)

    @classmethod
    def join(cls, parts: Sequence["Tokens"]) -> "Tokens":
        lengths = [part.lengths for part in parts]
        return cls(
            np.concatenate([np.empty(0, np.int32), *(part.ids for part in parts)]),
            np.concatenate([np.empty(0, np.bool_), *(part.trained for part in parts)]),
            np.concatenate([np.zeros(1, np.int64), *lengths]).cumsum(),
        )


@dataclass(frozen=True)
class TokenizedChunk:
    """What became of a chunk's rows. `ordinals` (int64 [examples]): which of its rows, from 0, each example was."""

    tokens: Tokens
    ordinals: NDArray[np.int64]
    rows: int
    truncated: int
    emptied: int  # truncated so far that no completion was left, hence no example
    bad: Counter[str]  # rows by reason
    listed: tuple[BadRow, ...]


@dataclass(frozen=True)
class Tokenized:
    """One example's ids, whether the loss is on each, and whether its end was cut off."""

    ids: list[int]
    trained: list[bool]
    truncated: bool = False


def tokenize_chunk(directory: Path, chunk: Chunk, dataset: Dataset, tokenizer: Tokenizer) -> TokenizedChunk:
    """Raises UserError when a file cannot be read on, or a template is at fault; bad rows are counted instead."""
    found = list(reading.read(directory, chunk))
    bad: list[tuple[int, BadRow]] = []
    examples: list[tuple[int, Row, Example]] = []
    for ordinal, row in enumerate(found):
        if isinstance(row, BadRow):
            bad.append((ordinal, row))
            continue
        try:
            examples.append((ordinal, row, formats.render(dataset, row.values, tokenizer)))
        except RowError as error:
            bad.append((ordinal, BadRow(row.where, error.reason, error.detail)))
    kept: list[Tokenized] = []
    ordinals: list[int] = []
    emptied = 0
    tokenized = tokenize([example for _, _, example in examples], dataset, tokenizer)
    for (ordinal, row, _), outcome in zip(examples, tokenized, strict=True):
        try:
            fitting = _fit(outcome, dataset)
        except RowError as error:
            bad.append((ordinal, BadRow(row.where, error.reason, error.detail)))
            continue
        if any(fitting.trained):
            kept.append(fitting)
            ordinals.append(ordinal)
        else:
            emptied += 1
    bad.sort(key=lambda entry: entry[0])
    return TokenizedChunk(
        tokens=_flat(kept),
        ordinals=np.array(ordinals, np.int64),
        rows=len(found),
        truncated=sum(example.truncated for example in kept),
        emptied=emptied,
        bad=Counter(row.reason for _, row in bad),
        listed=tuple(row for _, row in bad[:LISTED_PER_CHUNK]),
    )


def tokenize(examples: Sequence[Example], dataset: Dataset, tokenizer: Tokenizer) -> Iterable[Tokenized]:
    """Ids of each example: [BOS] prompt completion EOS.

    Prompt and completion are encoded apart, so that the prompt's ids are the same when it stands alone at
    generation. A document's first token is never trained: nothing before it in the document can predict it, and
    the token before it in a packed row belongs to another.
    """
    opening = [] if dataset.format == "chat" else bos_ids(tokenizer)
    special = frozenset(tokenizer.all_special_ids)
    eos = tokenizer.eos_token_id
    assert eos is not None  # tokenizer.load refuses such a model
    pieces = iter(encode(tokenizer, [segment.text for example in examples for segment in example.segments]))
    for example in examples:
        ids: list[int] = []
        trained: list[bool] = []
        for segment in example.segments:
            piece = next(pieces)
            if not ids and piece[:1] != opening:
                ids += opening
                trained += [False] * len(opening)
            ids += piece
            trained += [segment.trained] * len(piece)
        # A chat template usually closes the last turn itself, with EOS or a token of its own.
        if dataset.format != "chat" or special.isdisjoint(ids[-_CLOSING_TOKENS:]):
            ids.append(eos)
            trained.append(True)
        trained[0] = False
        yield Tokenized(ids, trained)


_CLOSING_TOKENS = 2  # `<|im_end|>` and a line break


def _fit(example: Tokenized, dataset: Dataset) -> Tokenized:
    limit, length = dataset.max_length, len(example.ids)
    if not any(example.trained):
        raise RowError(NOTHING_TO_LEARN, f"{length} tokens")
    if length <= limit or dataset.packing == "wrapped":
        return example
    if dataset.overlong == "drop":
        raise RowError(TOO_LONG, f"{length} tokens, dataset.max_length is {limit}")
    return Tokenized(example.ids[:limit], example.trained[:limit], truncated=True)


def _flat(examples: Sequence[Tokenized]) -> Tokens:
    lengths = np.array([0, *(len(example.ids) for example in examples)], np.int64)
    return Tokens(
        np.array(list(chain.from_iterable(example.ids for example in examples)), np.int32),
        np.array(list(chain.from_iterable(example.trained for example in examples)), np.bool_),
        lengths.cumsum(),
    )
