"""The text of examples that are samples."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.data import reading
from hyperpod_ft.data.encoder import Encoder
from hyperpod_ft.data.reading import Chunk, RawRow
from hyperpod_ft.data.text import formats
from hyperpod_ft.data.text.example import Example


@dataclass(frozen=True)
class SampleReader:
    """Finds the text of a source's examples by reading chunks a second time, because no run holds all text in memory.

    `ordinals`: for each chunk, which of its raw rows became examples, int64 [examples of the chunk].
    """

    directory: Path
    chunks: list[Chunk]
    ordinals: list[NDArray[np.int64]]
    dataset: Dataset
    encoder: Encoder

    def examples(self, wanted: NDArray[np.int64]) -> dict[int, Example]:
        """The text of these examples, by their numbers in the source; of preferences, the chosen documents."""
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
