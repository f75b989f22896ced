"""The run's prepared rows as what TRL's trainers read: a dataset of their numbers, and a collator that makes batches.

The dataset has the rows of the whole training in the order of `DataOrder`. Its batch k goes to rank k modulo their
number (accelerate's `BatchSamplerShard`), so that micro batch a of data-parallel rank d has the rows that batches.py
says, and a resumed trainer skips what it has trained on without reading it.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from hyperpod_ft.data.packing import IGNORED
from hyperpod_ft.engines.batches import Batch, DataOrder, PackedSplit

_ROW = "row"


def numbered(order: DataOrder, steps: int) -> Dataset:
    """The numbers of the rows of steps 1 to `steps`, one after another: int64 [steps * rows_per_step]."""
    return Dataset.from_dict({_ROW: np.concatenate([order.step(step) for step in range(1, steps + 1)])})


class RowCollator:
    """Makes batches of rows, by their numbers."""

    def __init__(self, split: PackedSplit, *, flat: bool) -> None:
        """`flat`: all rows of a batch are one; kernels for packed documents know no others."""
        self._split, self._flat = split, flat

    def __call__(self, examples: Sequence[Mapping[str, int]]) -> dict[str, torch.Tensor]:
        """The batch of these examples of the dataset."""
        return self.batch(self._split, np.array([example[_ROW] for example in examples]))

    def batch(self, split: PackedSplit, rows: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Tensors `input_ids`, `labels` and `position_ids`, int64 [rows, max_length], or [1, rows * max_length].

        Without an attention mask, transformers separates documents where the positions begin again.
        """
        batch = split.batch(rows)
        assert isinstance(batch, Batch)  # the engine's limits refuse encoder-decoders
        # nothing predicts a document's first token: TRL would count it, and predict it from the row before if flat
        batch.labels[batch.position_ids == 0] = IGNORED
        tensors = {name: getattr(batch, name) for name in ("input_ids", "labels", "position_ids")}
        return {name: tensor.reshape(1, -1) if self._flat else tensor for name, tensor in tensors.items()}

    def counted(self, batch: Mapping[str, torch.Tensor]) -> int:
        """What the mean loss of a batch is divided by: its label tokens."""
        return int((batch["labels"] != IGNORED).sum())


class PairCollator(RowCollator):
    """Makes batches of preferences, of rows that hold a pair each."""

    def batch(self, split: PackedSplit, rows: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Tensors `input_ids`, `attention_mask` and `completion_mask`, int64 [2 * rows, longest completion].

        First come the chosen completions, then the rejected ones, each with its prompt; padding is at the right.
        """
        batch = split.batch(rows)
        assert isinstance(batch, Batch)
        halves: tuple[list[dict[str, torch.Tensor]], ...] = ([], [])
        for row, positions in enumerate(batch.position_ids):
            begins = [*torch.nonzero(positions == 0).flatten().tolist(), len(positions)]
            for half, begin, end in zip(halves, begins, begins[1:], strict=False):
                half.append(
                    {
                        "input_ids": batch.input_ids[row, begin:end],
                        "attention_mask": torch.ones(end - begin, dtype=torch.int64),
                        "completion_mask": (batch.labels[row, begin:end] != IGNORED).long(),
                    }
                )
        documents = [*halves[0], *halves[1]]
        return {name: pad_sequence([each[name] for each in documents], batch_first=True) for name in documents[0]}

    def counted(self, batch: Mapping[str, torch.Tensor]) -> int:
        """The number of pairs."""
        return len(batch["input_ids"]) // 2
