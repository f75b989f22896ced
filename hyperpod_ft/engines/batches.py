"""Which rows each step trains on: a pure function of seed and step, so that a restart needs only the step.

The rows of all epochs form one stream: each epoch is its own seeded permutation of all rows, and the next follows
without a gap. Optimizer step k (from 1) consumes the stream's rows [(k-1)G, kG), where
G = micro_batch_size * gradient_accumulation_steps * data_parallel. Within a step, micro batch a of data-parallel
rank d takes rows [(a*D + d)*M, (a*D + d + 1)*M): any split of the same G rows trains on the same rows.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hyperpod_ft.data.packing import IGNORED
from hyperpod_ft.data.prepared import open_labels, open_split
from hyperpod_ft.data.seq2seq.packing import Seq2SeqRows
from hyperpod_ft.engines.interface import TrainingTask
from hyperpod_ft.errors import UserError

_COUNTED_ROWS = 1024  # at once


@dataclass(frozen=True)
class Batch:
    """Tensors [rows, max_length], int64, on the CPU. `position_ids` restart at 0 with each packed document."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    reference: torch.Tensor | None = None
    """Of preferences: the log-probability of each document before training, fp32 [documents]."""
    desirable: torch.Tensor | None = None
    """Of unpaired preferences: their labels, bool [rows]."""


@dataclass(frozen=True)
class Seq2SeqBatch:
    """The same for an encoder-decoder: int64, on the CPU, as `Seq2SeqRows` describes them."""

    input_ids: torch.Tensor
    documents: torch.Tensor
    decoder_input_ids: torch.Tensor
    decoder_documents: torch.Tensor
    labels: torch.Tensor


class PackedSplit:
    """The tokenized rows of a split, served as batches; memory-mapped, not read into memory."""

    def __init__(self, directory: Path) -> None:
        """Raises UserError when the split in `directory` is damaged or empty."""
        self.directory = directory
        self._split, self._desirable = open_split(directory), open_labels(directory)
        if not len(self):
            raise UserError(f"{directory}: has no rows", "add data, or raise dataset.max_length")

    def __len__(self) -> int:
        return len(self._split)

    @property
    def max_length(self) -> int:
        """Positions of a row, those of a decoder included."""
        split = self._split
        return int(split.input_ids.shape[1] + (split.labels.shape[1] if isinstance(split, Seq2SeqRows) else 0))

    def batch(self, rows: NDArray[np.int64]) -> Batch | Seq2SeqBatch:
        """These rows; -1 is a row without labels."""
        kind = Seq2SeqBatch if isinstance(self._split, Seq2SeqRows) else Batch
        arrays = {name: array[np.maximum(rows, 0)].astype(np.int64) for name, array in vars(self._split).items()}
        batch = kind(**{name: torch.from_numpy(array) for name, array in arrays.items()})
        batch.labels[torch.from_numpy(rows < 0)] = IGNORED
        if self._desirable is not None and isinstance(batch, Batch):
            return replace(batch, desirable=torch.from_numpy(self._desirable[np.maximum(rows, 0)]))
        return batch

    def label_tokens(self, rows: NDArray[np.int64]) -> int:
        """How many tokens of these rows count in the loss.

        The first of a row does not, since nothing predicts it, unless it is what a decoder predicts first.
        """
        first = 0 if isinstance(self._split, Seq2SeqRows) else 1
        return int(np.count_nonzero(self._split.labels[rows, first:] != IGNORED))


class PreferenceSplit(PackedSplit):
    """Rows of preferences: of the documents of a row, every first one is chosen and the next one rejected."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        blocks = np.array_split(np.arange(len(self)), -(-len(self) // _COUNTED_ROWS))
        documents = 2 * np.concatenate([self.pairs(block) for block in blocks])
        self._ends = documents.cumsum()
        self._begins = self._ends - documents
        self.reference: NDArray[np.float32] = np.full(self.documents, np.nan, np.float32)
        """The reference log-probability of each document, in the order of the rows: fp32 [documents], NaN: unknown."""

    @property
    def documents(self) -> int:
        return int(self._ends[-1])

    def pairs(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of pairs of documents in each row, int64 [rows].

        Padding at the end of a row begins at position 0 too, but is not a second document.
        """
        assert not isinstance(self._split, Seq2SeqRows)
        return np.asarray(np.count_nonzero(self._split.position_ids[rows] == 0, axis=1) // 2, np.int64)

    def documents_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers of these rows' documents, int64 [documents]; row -1 has none."""
        numbers = [np.arange(self._begins[row], self._ends[row]) for row in rows if row >= 0]
        return np.concatenate([np.empty(0, np.int64), *numbers])

    def without_reference(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The `rows` that have documents with an unknown reference."""
        unknown = np.concatenate([[0], np.isnan(self.reference).cumsum()])
        found: NDArray[np.int64] = rows[unknown[self._ends[rows]] > unknown[self._begins[rows]]]
        return found

    def batch(self, rows: NDArray[np.int64]) -> Batch:
        batch = super().batch(rows)
        assert isinstance(batch, Batch)
        return replace(batch, reference=torch.from_numpy(self.reference[self.documents_of(rows)]))


def held_out(task: TrainingTask) -> Path | None:
    """The split `validation`; None when the dataset holds out no rows.

    Raises UserError when the run file needs some.
    """
    directory = task.dataset / "validation"
    if directory.is_dir():
        return directory
    if task.config.training.validate_every_steps:
        raise UserError(
            f"training.validate_every_steps: {task.dataset} holds out no validation rows",
            "raise dataset.validation_share, or add data",
        )
    return None


@dataclass(frozen=True)
class DataOrder:
    """The stream of rows and its division into steps, micro batches and data-parallel ranks."""

    rows: int
    seed: int
    rows_per_step: int
    micro_batches_per_step: int  # of a data-parallel rank
    data_parallel: int

    def step(self, step: int) -> NDArray[np.int64]:
        """Row numbers of optimizer step `step` (from 1), int64 [rows_per_step]."""
        first = (step - 1) * self.rows_per_step
        positions = np.arange(first, first + self.rows_per_step)
        epochs = positions // self.rows
        result = np.empty(self.rows_per_step, np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            result[chosen] = _permutation(self.seed, int(epoch), self.rows)[positions[chosen] % self.rows]
        return result

    def first_rows(self, steps: int) -> NDArray[np.int64]:
        """The rows that the first `steps` steps train on, each once, in ascending order."""
        if steps * self.rows_per_step >= self.rows:
            return np.arange(self.rows)
        return np.unique(np.concatenate([self.step(step) for step in range(1, steps + 1)]))

    def micro_batches(self, step: int, data_parallel_rank: int) -> NDArray[np.int64]:
        """This rank's part of a step, int64 [micro_batches_per_step, rows]."""
        shape = (self.micro_batches_per_step, self.data_parallel, -1)
        return self.step(step).reshape(shape)[:, data_parallel_rank]


@lru_cache(maxsize=2)  # a step may span two epochs
def _permutation(seed: int, epoch: int, rows: int) -> NDArray[np.int64]:
    # PCG64 and SeedSequence are stable across NumPy versions and machines; Generator.permutation's own stream is
    # not promised to be, so the permutation is the order of random keys instead
    keys = np.random.Generator(np.random.PCG64([seed, epoch])).random(rows)
    return np.argsort(keys, kind="stable")
