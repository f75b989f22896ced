"""The draw of examples into splits, and the samples of each split as text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.data import reading
from hyperpod_ft.data.encoder import Encoder
from hyperpod_ft.data.inspection import examples as inspection
from hyperpod_ft.data.inspection.shown import ShownExample
from hyperpod_ft.data.prepared import Sample, SplitName
from hyperpod_ft.data.reading import Chunk, RawRow
from hyperpod_ft.data.text import formats
from hyperpod_ft.data.text.example import Example
from hyperpod_ft.data.tokenization import separated

SAMPLES_PER_SPLIT = 256


@dataclass(frozen=True)
class Draw:
    """The examples of each split: int64 indices, in an order drawn from the seed."""

    train: NDArray[np.int64]
    validation: NDArray[np.int64]


def draw(examples: int, validation_share: float, seed: int) -> Draw:
    """One permutation gives the split, the order of training and the samples. Training keeps at least one example."""
    order = np.random.default_rng([seed, 1]).permutation(examples)
    validation = min(round(examples * validation_share), examples - 1)
    return Draw(order[validation:], order[:validation])


def draw_rows(origins: Sequence[NDArray[np.int32]], validation_share: float, seed: int) -> Draw:
    """The same of raw rows: all examples of a conversation are in one split, one after the other.

    origins: for each chunk, as TokenizedChunk has them.
    """
    news = [np.diff(of_chunk[:, 0], prepend=np.int32(-1)) != 0 for of_chunk in origins]
    new = np.concatenate(news) if news else np.empty(0, np.bool_)
    first = np.flatnonzero(new)
    drawn = draw(len(first), validation_share, seed)
    if new.all():
        return drawn
    sizes = np.diff(first, append=len(new))
    return Draw(*(_expanded(rows, first, sizes) for rows in (drawn.train, drawn.validation)))


def _expanded(rows: NDArray[np.int64], first: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The examples of the rows; `first` and `sizes` (int64 [rows]): each row's first example, and how many it has."""
    counts = sizes[rows]
    within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    return np.asarray(np.repeat(first[rows], counts) + within)


@dataclass(frozen=True)
class SampleReader:
    """Finds the text of examples by reading their chunks a second time, because no run holds all text in memory.

    `origins`: for each chunk, as TokenizedChunk has them.
    """

    directory: Path
    chunks: list[Chunk]
    origins: list[NDArray[np.int32]]
    dataset: Dataset
    encoder: Encoder

    def samples(self, drawn: Draw) -> list[Sample]:
        """Of the first `SAMPLES_PER_SPLIT` examples of each split those with a prompt, which a model can be asked.

        Of preferences, the chosen completions.
        """
        wanted: list[tuple[SplitName, int]] = [
            *(("train", example) for example in drawn.train[:SAMPLES_PER_SPLIT].tolist()),
            *(("validation", example) for example in drawn.validation[:SAMPLES_PER_SPLIT].tolist()),
        ]
        found = self.examples(np.array([example for _, example in wanted], np.int64))
        chosen = [(split, found[example][1][0]) for split, example in wanted]
        return [Sample.of(split, example) for split, example in chosen if example.prompt.strip()]

    def shown(self, wanted: NDArray[np.int64]) -> list[ShownExample]:
        """Examples token by token, in the order in which they are wanted."""
        found = self.examples(wanted)
        chosen = [found[example] for example in wanted.tolist()]
        return [inspection.shown(row.where, documents, self.dataset, self.encoder) for row, documents in chosen]

    def examples(self, wanted: NDArray[np.int64]) -> dict[int, tuple[RawRow, tuple[Example, ...]]]:
        """Examples by their number, each with its raw row and its documents."""
        ends = np.cumsum([len(origins) for origins in self.origins])
        chunk_of = np.searchsorted(ends, wanted, side="right")
        found: dict[int, tuple[RawRow, tuple[Example, ...]]] = {}
        for number in np.unique(chunk_of).tolist():
            here = np.sort(wanted[chunk_of == number])
            origins = self.origins[number][here - (ends[number] - len(self.origins[number]))]
            ordinals = np.unique(origins[:, 0]).tolist()
            rows = reading.read(self.directory, self.chunks[number], frozenset(ordinals))
            read = dict(zip(ordinals, rows, strict=True))  # in the order of the file
            for example, (ordinal, place) in zip(here.tolist(), origins.tolist(), strict=True):
                row = read[ordinal]
                assert isinstance(row, RawRow)  # it became an example the first time
                (made,) = separated([formats.examples(self.dataset, row.values, self.encoder.tokenizer)], self.encoder)
                found[example] = row, made[place]
        return found
