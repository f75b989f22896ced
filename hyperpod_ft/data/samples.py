"""The draw of examples into splits, and the samples of each split as text."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.data import reading
from hyperpod_ft.data.encoder import Encoder
from hyperpod_ft.data.prepared import Sample, SplitName
from hyperpod_ft.data.reading import Chunk, RawRow
from hyperpod_ft.data.text import formats
from hyperpod_ft.data.text.example import Example

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


@dataclass(frozen=True)
class SampleReader:
    """Finds the text of examples by reading their chunks a second time, because no run holds all text in memory.

    `ordinals`: for each chunk, which of its raw rows became examples, int64 [examples of the chunk].
    """

    directory: Path
    chunks: list[Chunk]
    ordinals: list[NDArray[np.int64]]
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
        found = self._examples(np.array([example for _, example in wanted], np.int64))
        return [Sample.of(split, found[example]) for split, example in wanted if found[example].prompt.strip()]

    def _examples(self, wanted: NDArray[np.int64]) -> dict[int, Example]:
        ends = np.cumsum([len(ordinals) for ordinals in self.ordinals])
        chunk_of = np.searchsorted(ends, wanted, side="right")
        found: dict[int, Example] = {}
        for number in np.unique(chunk_of).tolist():
            here = np.sort(wanted[chunk_of == number])  # in the order of their raw rows
            ordinals = self.ordinals[number][here - (ends[number] - len(self.ordinals[number]))]
            rows = reading.read(self.directory, self.chunks[number], frozenset(ordinals.tolist()))
            for example, row in zip(here.tolist(), rows, strict=True):
                assert isinstance(row, RawRow)  # it became an example the first time
                found[example] = formats.documents(self.dataset, row.values, self.encoder.tokenizer)[0]
        return found
