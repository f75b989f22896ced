"""The raw rows of a chunk to token arrays: parse, render, tokenize, and count every one."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyperpod_ft.config.sections.data import Data, Part
from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.data import reading
from hyperpod_ft.data.columns import UnusedColumns
from hyperpod_ft.data.encoder import Encoder
from hyperpod_ft.data.fitting import TOO_LONG, Fitted
from hyperpod_ft.data.reading import BadRow, Chunk
from hyperpod_ft.data.text import chat, formats
from hyperpod_ft.data.text.example import Example, RowError
from hyperpod_ft.data.tokens import Tokens
from hyperpod_ft.errors import UserError

LISTED = 50  # bad rows that are listed with their line; all are counted
_NAMED_IN_ERROR = 5


@dataclass(frozen=True)
class ChatCount:
    """Of conversations. `ends`: how many turns end with each token."""

    turns: int = 0  # trained
    unrolled: int = 0  # conversations that are several examples
    left_out: int = 0  # examples of conversations whose other examples are used
    loses_reasoning: int = 0  # turns whose reasoning the chat template does not write
    ends: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of(
        cls,
        made: Sequence[Sequence[tuple[Example, ...]]],
        kept: NDArray[np.bool_],
        used: set[int],
        tokens: Tokens,
        encoder: Encoder,
    ) -> "ChatCount":
        """Of the raw rows `made`, of which the examples `kept` (bool [examples]) and the raw rows `used` are used."""
        examples = [(number, example) for number, of_row in enumerate(made) for (example,) in of_row]
        chosen = [example for (_, example), use in zip(examples, kept.tolist(), strict=True) if use]
        after = np.append(tokens.trained[1:], False)
        after[(tokens.starts + tokens.lengths - 1)] = False
        last = tokens.ids[tokens.trained & ~after]
        # a cut answer ends with any token
        ends, counts = np.unique(last[np.isin(last, encoder.special_ids)], return_counts=True)
        return cls(
            turns=sum(segment.trained for example in chosen for segment in example.segments),
            unrolled=sum(len(made[number]) > 1 for number in used),
            left_out=sum(number in used for number, _ in examples) - len(chosen),
            loses_reasoning=sum(example.loses_reasoning for example in chosen),
            ends=Counter(dict(zip(ends.tolist(), counts.tolist(), strict=True))),
        )

    def __add__(self, other: "ChatCount") -> "ChatCount":
        return ChatCount(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


@dataclass
class RawRowCount:
    """Raw rows that were read: used, or bad and why."""

    rows_read: int = 0
    rows_used: int = 0
    truncated: int = 0  # examples, as the next ones
    emptied: int = 0  # left without a completion by truncation, and so not examples
    unknown_tokens: int = 0  # that stand for text for which the tokenizer has none
    unknown_in: int = 0  # examples
    chats: ChatCount = field(default_factory=ChatCount)
    unused: set[str] = field(default_factory=set)  # columns that the format does not use
    bad: Counter[str] = field(default_factory=Counter)  # by reason
    listed: list[BadRow] = field(default_factory=list)  # the first of them

    def add(self, other: "RawRowCount", source: str = "") -> None:
        """`source`: what comes before the names of the other's files, if there are several."""
        self.rows_read += other.rows_read
        self.rows_used += other.rows_used
        self.truncated += other.truncated
        self.emptied += other.emptied
        self.unknown_tokens += other.unknown_tokens
        self.unknown_in += other.unknown_in
        self.chats += other.chats
        self.unused |= other.unused
        self.bad += other.bad
        listed = other.listed[: LISTED - len(self.listed)]
        self.listed += [replace(row, where=f"{source}{row.where}") for row in listed]

    @classmethod
    def total(cls, counts: Iterable["RawRowCount"]) -> "RawRowCount":
        """Those of all sources."""
        total = cls()
        for one in counts:
            total.add(one)
        return total

    def require_some(self, part: Part) -> None:
        """Raises UserError when no row of the source can be used, with any `max_bad_rows`."""
        if not self.rows_used:
            named = self._named()
            raise UserError(
                f"none of the {self.rows_read} rows can be used{': ' if named else ''}{named}",
                f"correct {part.key}.format, {part.key}.source, {part.key}.files or the rows"
                + self._for_long_ones(part.dataset),
            )

    def check(self, dataset: Data | Dataset) -> None:
        """Raises UserError when more rows are bad than `max_bad_rows`."""
        count = self.bad.total()
        if count > dataset.max_bad_rows:
            remedy = f"correct them, or set dataset.max_bad_rows to {count} or more" + self._for_long_ones(dataset)
            raise UserError(
                f"{count} of {self.rows_read} rows cannot be used and dataset.max_bad_rows is"
                f" {dataset.max_bad_rows}: {self._named()}",
                remedy,
            )

    def _named(self) -> str:
        count = self.bad.total()
        named = ", ".join(str(row) for row in self.listed[:_NAMED_IN_ERROR])
        return named + (f" and {count - _NAMED_IN_ERROR} more" if count > _NAMED_IN_ERROR else "")

    def _for_long_ones(self, dataset: Data | Dataset) -> str:
        if not self.bad[TOO_LONG] + self.emptied:
            return ""
        lengths = "max_length or max_target_length" if dataset.max_target_length else "max_length"
        truncate = " or set dataset.overlong to truncate" if self.bad[TOO_LONG] and dataset.has_answers else ""
        return f", or for long ones raise dataset.{lengths}{truncate}"


@dataclass(frozen=True)
class TokenizedChunk:
    """A chunk's examples. `tokens` are those of their documents, `dataset.documents_per_example` each.

    origins: int32 [examples, 2], the number of each example's raw row in the chunk, and which of its examples it is,
    both from 0. desirable: bool [examples], their labels; empty for all formats but `unpaired-preference`.
    """

    tokens: Tokens
    origins: NDArray[np.int32]
    desirable: NDArray[np.bool_]
    counts: RawRowCount


def tokenize_chunk(directory: Path, chunk: Chunk, dataset: Dataset, encoder: Encoder) -> TokenizedChunk:
    """Bad rows are counted.

    Raises UserError when the rest of a file cannot be read, a template is wrong, or a column would change the training.
    """
    raw_rows = 0
    bad: list[tuple[int, BadRow]] = []
    rows: list[tuple[int, str]] = []  # which, and where
    made: list[list[tuple[Example, ...]]] = []
    unused = UnusedColumns(dataset)
    # no row stays in memory: it may hold images, and there is a process per CPU
    for ordinal, row in enumerate(reading.read(directory, chunk)):
        raw_rows += 1
        if isinstance(row, BadRow):
            bad.append((ordinal, row))
            continue
        unused.add(row.where, row.values)
        try:
            images = encoder.images_of(row, directory)
            found = formats.examples(dataset, row.values, encoder.tokenizer, images)
            made.append([tuple(map(Example.without_images, documents)) for documents in found] if images else found)
            rows.append((ordinal, row.where))
        except RowError as error:
            bad.append((ordinal, BadRow(row.where, error.reason, error.detail)))

    made = separated(made, encoder)
    examples = [example for of_row in made for example in of_row]
    origins = [(number, place) for number, of_row in enumerate(made) for place in range(len(of_row))]
    fitted = Fitted.of(tokenize([document for example in examples for document in example], dataset, encoder), dataset)
    kept = fitted.kept
    used = {origins[index][0] for index in np.flatnonzero(kept).tolist()}
    unusable: dict[int, BadRow] = {}
    for index in np.flatnonzero(fitted.nothing | fitted.dropped).tolist():
        number = origins[index][0]
        if number not in used:
            unusable.setdefault(number, fitted.why_unusable(index, rows[number][1]))
    bad += [(rows[number][0], row) for number, row in unusable.items()]
    bad.sort(key=lambda entry: entry[0])
    left = fitted.left
    unknown = np.flatnonzero(left.ids == encoder.unknown) if encoder.unknown is not None else np.empty(0, np.int64)
    unknown_in = np.searchsorted(left.lengths.cumsum(), unknown, side="right") // dataset.documents_per_example
    return TokenizedChunk(
        tokens=left,
        origins=np.array([(rows[number][0], place) for number, place in origins], np.int32).reshape(-1, 2)[kept],
        desirable=np.array(labels, np.bool_)[kept] if (labels := _labels(examples)) else np.empty(0, np.bool_),
        counts=RawRowCount(
            rows_read=raw_rows,
            rows_used=len(used),
            truncated=int((fitted.truncated & kept).sum()),
            emptied=int(fitted.emptied.sum()),
            unknown_tokens=len(unknown),
            unknown_in=len(np.unique(unknown_in)),
            chats=ChatCount.of(made, kept, used, left, encoder) if dataset.format == "chat" else ChatCount(),
            unused=unused.names,
            bad=Counter(row.reason for _, row in bad),
            listed=[row for _, row in bad[:LISTED]],
        ),
    )


def _labels(examples: Sequence[tuple[Example, ...]]) -> list[bool]:
    """The label of each example; none where they have none."""
    return [documents[0].desirable for documents in examples if documents[0].desirable is not None]


def separated(made: Sequence[Sequence[tuple[Example, ...]]], encoder: Encoder) -> list[list[tuple[Example, ...]]]:
    """The examples of raw rows; the turns of a conversation stay in one only where that is exact.

    They do where the context of the last one, encoded as one text as a server does, has the tokens of its pieces, and
    where each turn ends with a special token, at which a server stops.
    """
    several = [documents[0] for of_row in made for documents in of_row if len(documents[0].places) > 1]
    if not several:
        return [list(of_row) for of_row in made]
    assert encoder.tokenizer is not None
    reach = encoder.backend.reach
    texts: list[str] = []
    for example in several:
        for one, other in pairwise(example.segments[:-1]):
            left, right = (one.text[-reach:], other.text[:reach]) if reach else (one.text, other.text)
            texts += [left, right, left + right]
    encoded = encoder.backend.encode(texts)
    ids, edges = encoded.ids.tolist(), np.concatenate([np.zeros(1, np.int64), encoded.lengths.cumsum()]).tolist()
    special, first = frozenset(encoder.special_ids.tolist()), 0
    inexact: set[int] = set()
    for example in several:
        for number in range(len(example.segments) - 2):
            start, left_end, right_end, stop = edges[first : first + 4]
            is_answer = number % 2 == 1
            if ids[start:right_end] != ids[right_end:stop] or (is_answer and ids[left_end - 1] not in special):
                inexact.add(id(example))
            first += 3
    return [
        [
            separate
            for documents in of_row
            for separate in (
                [(turn,) for turn in chat.alone(documents[0])] if id(documents[0]) in inexact else [documents]
            )
        ]
        for of_row in made
    ]


def tokenize(examples: Sequence[Example], dataset: Dataset, encoder: Encoder) -> Tokens:
    """The documents' tokens: [BOS] prompt completion EOS; for an encoder-decoder, prompt EOS completion EOS.

    A prompt without a completion has no EOS.
    Prompt and completion are encoded separately, so that the prompt's ids are the same as in generation. A document's
    first token is never trained: nothing in the document predicts it, and the token before it in a packed row belongs
    to another document.
    """
    segments = [segment for example in examples for segment in example.segments]
    encoded = encoder.backend.encode([segment.text for segment in segments])
    counts = np.array([len(example.segments) for example in examples], np.int64)
    trained = np.repeat(np.array([segment.trained for segment in segments], np.bool_), encoded.lengths)
    for number in (number for number, segment in enumerate(segments) if segment.untrained):
        start = int(encoded.lengths[:number].sum())
        trained[start : start + _tokens_before(segments[number].untrained, segments[number].text, encoder)] = False
    # where the tokens of each example begin and end, before BOS and EOS are inserted
    edges = np.concatenate([np.zeros(1, np.int64), encoded.lengths.cumsum()])
    first = counts.cumsum() - counts
    begins, ends = edges[first], edges[first + counts]
    if dataset.max_target_length is None:
        templated = np.array([example.templated for example in examples], np.bool_)
        inserted = begins
        with_bos = _adds_bos(encoded.ids, begins, edges[first + 1], templated, encoder)
        answered = np.array([example.segments[-1].trained for example in examples], np.bool_)
        with_eos = answered & _adds_eos(encoded.ids, begins, ends, templated, encoder)
        mark = (encoder.bos or (encoder.eos,))[0]
    else:
        inserted = edges[first + counts - 1]  # the completion is the last segment
        with_bos = with_eos = np.ones(len(examples), np.bool_)
        mark = encoder.eos
    lengths = with_bos + (ends - begins) + with_eos
    # At the same place, an EOS is inserted before the next example's BOS: in this order.
    places = np.stack([inserted, ends], axis=1).ravel()
    wanted = np.stack([with_bos, with_eos], axis=1).ravel()
    marks = np.resize(np.array([mark, encoder.eos], np.int32), len(places))
    ids = np.insert(encoded.ids, places[wanted], marks[wanted])
    trained = np.insert(trained, places[wanted], np.resize(np.array([False, True]), len(places))[wanted])
    trained[lengths.cumsum() - lengths] = False
    return Tokens(ids, trained, lengths)


def _tokens_before(place: int, text: str, encoder: Encoder) -> int:
    """How many tokens of a text begin before the character `place`."""
    return sum(start < place for start, _ in encoder.offsets(text))


def _adds_bos(
    ids: NDArray[np.int32],
    begins: NDArray[np.int64],
    firsts_end: NDArray[np.int64],
    templated: NDArray[np.bool_],
    encoder: Encoder,
) -> NDArray[np.bool_]:
    """Whether to add BOS to each example: if the tokenizer adds one, and its first segment does not begin with one."""
    if not encoder.bos:
        return np.zeros(len(begins), np.bool_)
    own = firsts_end > begins
    own[own] = ids[begins[own]] == encoder.bos[0]
    return ~own & ~templated  # a chat template writes it


def _adds_eos(
    ids: NDArray[np.int32],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    templated: NDArray[np.bool_],
    encoder: Encoder,
) -> NDArray[np.bool_]:
    """Whether to add EOS to each example. Most chat templates close the last turn, with EOS or their own token."""
    with_eos = np.ones(len(ends), np.bool_)
    if templated.any():
        there = templated & (ends > begins)
        with_eos[there] = ~np.isin(ids[(ends - 1)[there]], encoder.special_ids)
    return with_eos
