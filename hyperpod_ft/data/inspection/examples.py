"""What is trained of raw rows, token by token: made by the functions that stage dataset uses, so it cannot differ."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal

import numpy as np

from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.data.columns import UnusedColumns
from hyperpod_ft.data.encoder import Encoder
from hyperpod_ft.data.fitting import Fitted
from hyperpod_ft.data.images import files
from hyperpod_ft.data.inspection import reasons
from hyperpod_ft.data.inspection.shown import Reason, ShownDocument, ShownExample, ShownToken
from hyperpod_ft.data.reading import BadRow, RawRow
from hyperpod_ft.data.text import formats
from hyperpod_ft.data.text.example import Example, RowError
from hyperpod_ft.data.tokenization import separated, tokenize

_PREFERENCE = ("chosen", "rejected")
_UNPAIRED = {None: "", True: "desirable", False: "undesirable"}


@dataclass(frozen=True)
class ShownRow:
    """A raw row: its examples, and why it cannot be used."""

    where: str
    examples: tuple[ShownExample, ...]
    is_used: bool
    bad: BadRow | None


def inspect(row: RawRow | BadRow, directory: Path, dataset: Dataset, encoder: Encoder) -> ShownRow:
    """What stage dataset makes of a raw row of the dataset in `directory`.

    Raises UserError where that stage stops at any such row.
    """
    if isinstance(row, BadRow):
        return ShownRow(row.where, (), False, row)
    UnusedColumns(dataset).add(row.where, row.values)
    try:
        images = encoder.images_of(row, directory)
        (made,) = separated([formats.examples(dataset, row.values, encoder.tokenizer, images)], encoder)
    except RowError as error:
        return ShownRow(row.where, (), False, BadRow(row.where, error.reason, error.detail))
    fitted = _fitted(made, dataset, encoder)
    unusable = np.flatnonzero(fitted.nothing | fitted.dropped).tolist()
    is_used = bool(fitted.kept.any())
    bad = fitted.why_unusable(unusable[0], row.where) if unusable and not is_used else None
    return ShownRow(row.where, tuple(_examples(row.where, made, fitted, encoder)), is_used, bad)


def shown(where: str, documents: tuple[Example, ...], dataset: Dataset, encoder: Encoder) -> ShownExample:
    """One example of a raw row, bounded in size."""
    (found,) = _examples(where, [documents], _fitted([documents], dataset, encoder), encoder, bounded=True)
    return found


def tokens_of(
    example: Example, trained: Sequence[bool], within: Sequence[bool], dataset: Dataset, encoder: Encoder
) -> list[ShownToken]:
    """The tokens of a document, of which these are `trained` and `within` the length that it may have.

    Apart from BOS and EOS, their texts make up the document's text: tokens that share a character are shown as one, and
    what becomes no token, such as spaces that a tokenizer removes, with the next one.
    """
    text = "".join(segment.text for segment in example.segments)
    why = reasons.of_characters(example, dataset, encoder.tokenizer)
    found: list[_Token] = []
    written = 0
    places = _places(example, len(trained), dataset, encoder)
    for place, is_trained, is_within in zip(places, trained, within, strict=True):
        last = found[-1] if found else None
        shares = place.mark is None and (place.start < written or place.stop <= written)
        if last and shares and (last.mark, last.trained, last.within) == (None, is_trained, is_within):
            last.stop, last.count = max(last.stop, place.stop), last.count + 1
        else:
            found.append(_Token(written, max(written, place.stop), is_trained, is_within, place.mark))
        written = max(written, place.stop)
    return [
        ShownToken(
            text[token.start : token.stop] if token.mark is None else encoder.token(_id_of(token.mark, encoder)),
            token.trained,
            (token.mark or _reason(why[token.start : token.stop])) if token.within else "cut",
            token.count,
        )
        for token in found
    ]


@dataclass(frozen=True)
class _Place:
    """Where a token's characters are in the text of its document; `mark`: it was put there, and has none."""

    start: int
    stop: int
    mark: Literal["BOS", "EOS"] | None = None


@dataclass
class _Token:
    """Tokens that are shown as one, and their characters."""

    start: int
    stop: int
    trained: bool
    within: bool
    mark: Literal["BOS", "EOS"] | None
    count: int = 1


def _places(example: Example, tokens: int, dataset: Dataset, encoder: Encoder) -> Iterator[_Place]:
    """The place of each of a document's tokens, as `tokenize` puts them together."""
    offsets = [encoder.offsets(segment.text) for segment in example.segments]
    marks = tokens - sum(map(len, offsets))
    has_encoder = dataset.max_target_length is not None
    at = 0
    answered = example.segments[-1].trained
    if marks == 1 + answered and not has_encoder:
        yield _Place(0, 0, "BOS")
    for number, (segment, of_segment) in enumerate(zip(example.segments, offsets, strict=True), 1):
        if has_encoder and number == len(offsets):
            yield _Place(at, at, "EOS")
        end = at + len(segment.text)
        for start, stop in of_segment[:-1]:
            yield _Place(at + start, at + stop)
        if of_segment:
            yield _Place(at + of_segment[-1][0], end)
        at = end
    if marks and answered:
        yield _Place(at, at, "EOS")


def _id_of(mark: Literal["BOS", "EOS"], encoder: Encoder) -> int:
    return encoder.eos if mark == "EOS" else encoder.bos[0]


def _reason(of_characters: Sequence[Reason]) -> Reason:
    """That of a token: of a message, if one of its characters is."""
    return next((reason for reason in of_characters if reason != "template"), "template")


def _fitted(examples: Sequence[tuple[Example, ...]], dataset: Dataset, encoder: Encoder) -> Fitted:
    return Fitted.of(
        tokenize([document for documents in examples for document in documents], dataset, encoder), dataset
    )


def _examples(
    where: str, examples: Sequence[tuple[Example, ...]], fitted: Fitted, encoder: Encoder, *, bounded: bool = False
) -> Iterator[ShownExample]:
    number = 0
    for place, documents in enumerate(examples):
        made = []
        names = _PREFERENCE if len(documents) > 1 else (_UNPAIRED[documents[0].desirable],)
        for name, document in zip(names, documents, strict=True):
            start = int(fitted.tokens.starts[number])
            of_document = slice(start, start + int(fitted.tokens.lengths[number]))
            within = fitted.within[of_document]
            trained = fitted.tokens.trained[of_document] & within & fitted.kept[place]
            tokens = tokens_of(document, trained.tolist(), within.tolist(), fitted.dataset, encoder)
            made.append(ShownDocument.of(name, tokens, bounded=bounded))
            number += 1
        turns = tuple(turn + 1 for turn in documents[0].places)
        yield ShownExample(where, turns, _outcome(fitted, place), tuple(made), _images(documents[0]))


def _images(example: Example) -> tuple[str, ...]:
    names = [name or "in the row" for name in example.image_names]
    sizes = [f" ({image.width} x {image.height} pixels)" for image in files.opened(example.images)]
    return tuple(name + size for name, size in zip_longest(names, sizes, fillvalue=""))


def _outcome(fitted: Fitted, example: int) -> str:
    if fitted.nothing[example] or fitted.dropped[example]:
        bad = fitted.why_unusable(example, "")
        return f"not trained: {bad.reason}: {bad.detail}"
    if fitted.emptied[example]:
        return "not trained: its prompt fills dataset.max_length"
    return "cut to dataset.max_length" if fitted.truncated[example] else ""
