"""A source of a run's data: its rows become tokens once, and text again where a reader wants to see some."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyperpod_ft.config.sections.data import Part
from hyperpod_ft.data import reading, workers
from hyperpod_ft.data.encoder import Encoder
from hyperpod_ft.data.inspection import examples as inspection
from hyperpod_ft.data.inspection.shown import ShownExample
from hyperpod_ft.data.mixing.mixture import Examples, Numbers, number_type
from hyperpod_ft.data.reading import Chunk, RawRow
from hyperpod_ft.data.stored.spool import Spool
from hyperpod_ft.data.stored.token_stream import TokenStream
from hyperpod_ft.data.text import formats
from hyperpod_ft.data.text.example import Example
from hyperpod_ft.data.tokenization import RawRowCount, separated
from hyperpod_ft.errors import UserError

_PROGRESS_SECONDS = 5.0


@dataclass(frozen=True)
class TokenizedSource:
    """A source whose examples are `first` to `stop` of all tokens.

    `origins`: from which of its chunk's raw rows each is, as TokenizedChunk has it; `ends`: how many examples there are
    up to the end of each chunk.
    """

    part: Part
    name: str  # empty if it is the only one
    directory: Path
    chunks: list[Chunk]
    first: int
    origins: Spool[np.int32]
    counts: RawRowCount = field(default_factory=RawRowCount)
    ends: list[int] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.first + (self.ends[-1] if self.ends else 0)

    def examples(self, kept: NDArray[np.bool_]) -> Examples:
        """Those of `kept`, bool [examples of all sources], that are this source's."""
        kind, edges = number_type(self.stop + 1), []
        for number, (first, stop) in enumerate(pairwise([self.first, *(self.first + end for end in self.ends)])):
            chosen = np.flatnonzero(kept[first:stop])
            rows = self.origins_of(number)[chosen, 0]
            edges.append((first + chosen[np.diff(rows, prepend=-1) != 0]).astype(kind))
        edges.append(np.array([self.stop], kind))
        return Examples(np.concatenate(edges), kept, self.part.trains, self.part.weight, self.part.rows)

    def origins_of(self, chunk: int) -> NDArray[np.int32]:
        """Those of one chunk: int32 [examples, 2]."""
        first = self.ends[chunk - 1] if chunk else 0
        return self.origins.read(2 * first, 2 * self.ends[chunk]).reshape(-1, 2)


@dataclass(frozen=True)
class ReadExample:
    """An example as text: its documents, and the raw row and the source that they are from."""

    documents: tuple[Example, ...]
    row: RawRow
    source: TokenizedSource

    def shown(self, encoder: Encoder) -> ShownExample:
        """The example token by token."""
        return inspection.shown(self.row.where, self.documents, self.source.part.dataset, encoder)


def tokenized(
    part: Part, directory: Path, encoder: Encoder, stream: TokenStream, first: int, *, named: bool
) -> TokenizedSource:
    """Add all tokens of a source to `stream`, which has `first` examples of others. Raises UserError."""
    name = part.name if named else ""
    try:
        chunks = reading.sliced(directory, reading.chunks(directory), part.dataset.split)
        source = TokenizedSource(part, name, directory, chunks, first, Spool(stream.directory, np.int32))
        _tokenize(source, encoder, stream)
    except UserError as error:
        if not name:
            raise
        raise UserError(f"{part.key} ({name}): {error.problem}", error.remedy) from error
    return source


def _tokenize(source: TokenizedSource, encoder: Encoder, stream: TokenStream) -> None:
    name, counts, chunks = source.name, source.counts, source.chunks
    started = reported = time.monotonic()
    done = workers.tokenize_all(source.directory, chunks, source.part.dataset, encoder)
    for number, chunk in enumerate(done, 1):
        source.origins.append(chunk.origins)
        source.ends.append(len(source.origins) // 2)
        counts.add(chunk.counts, f"{name}/" if name else "")
        stream.add(chunk.tokens)
        stream.desirable.append(chunk.desirable)
        now = time.monotonic()
        if now - reported >= _PROGRESS_SECONDS or number == len(chunks):
            reported = now
            rate = counts.rows_read / max(now - started, 1e-9)
            print(
                f"{name}{': ' if name else ''}tokenized {counts.rows_read:,} rows, {number / len(chunks):.0%} of the"
                f" data, {rate:,.0f} rows/s",
                flush=True,
            )


def read(sources: Sequence[TokenizedSource], wanted: Numbers, encoder: Encoder) -> dict[int, ReadExample]:
    """Examples by their numbers among those of all sources, in the order wanted, without the files of their images."""
    found = {
        number: replace(one, documents=tuple(map(Example.without_images, one.documents)))
        for number, one in each(sources, wanted, encoder)
    }
    return {number: found[number] for number in wanted.tolist()}


def each(sources: Sequence[TokenizedSource], wanted: Numbers, encoder: Encoder) -> Iterator[tuple[int, ReadExample]]:
    """Each wanted example once, with its number, in ascending order; only those of one raw row are in memory.

    No run holds all text in memory, so it is read again.
    """
    for source in sources:
        own = np.unique(wanted[(wanted >= source.first) & (wanted < source.stop)]) - source.first
        chunk_of = np.searchsorted(source.ends, own, side="right")
        for number in np.unique(chunk_of).tolist():
            here = own[chunk_of == number]
            of_chunk = source.origins_of(number)
            origins = of_chunk[here - (source.ends[number] - len(of_chunk))]
            rows = reading.read(source.directory, source.chunks[number], frozenset(origins[:, 0].tolist()))
            of_rows = groupby(zip(here.tolist(), origins.tolist(), strict=True), lambda one: one[1][0])
            for row, (_, of_row) in zip(rows, of_rows, strict=True):  # both in the order of the file
                assert isinstance(row, RawRow)  # it became an example the first time
                images = encoder.images_of(row, source.directory)
                made = formats.examples(source.part.dataset, row.values, encoder.tokenizer, images)
                (examples,) = separated([made], encoder)
                for example, (_, place) in of_row:
                    yield source.first + example, ReadExample(examples[place], row, source)
