"""The run's prepared rows as what TRL's trainers read: a dataset of their numbers, and a collator that makes batches.

The dataset has the rows of the whole training in the order of `DataOrder`. Its batch k goes to rank k modulo their
number (accelerate's `BatchSamplerShard`), so that micro batch a of data-parallel rank d has the rows that batches.py
says, and a resumed trainer skips what it has trained on without reading it.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

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

    def __init__(self, split: PackedSplit, *, flat: bool, pad: int) -> None:
        """`flat`: all rows of a batch are one; kernels for packed documents know no others. `pad`: the id that pads."""
        self._split, self._flat, self._pad = split, flat, pad

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
        chosen, rejected = zip(*(_documents(batch, row)[:2] for row in range(len(rows))), strict=True)
        return _padded([*chosen, *rejected], self._pad)

    def counted(self, batch: Mapping[str, torch.Tensor]) -> int:
        """The number of pairs."""
        return len(batch["input_ids"]) // 2


class ScoredPairCollator(PairCollator):
    """Makes batches of the same pairs for a model that scores them."""

    def batch(self, split: PackedSplit, rows: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Without `completion_mask`: a score is that of the last token."""
        return {name: tensor for name, tensor in super().batch(split, rows).items() if name != "completion_mask"}


class UnpairedCollator(RowCollator):
    """Makes batches of unpaired preferences, of rows that hold one each."""

    def batch(self, split: PackedSplit, rows: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Tensors `input_ids`, `attention_mask` and `completion_mask`, int64 [rows, longest], and `label`, bool [rows].

        By it TRL estimates the KL divergence: the first three also with `KL_` before their names, of each prompt with
        the completion of the row before, and of the first with that of the last.
        """
        batch = split.batch(rows)
        assert isinstance(batch, Batch) and batch.desirable is not None
        documents = [_documents(batch, row)[0] for row in range(len(rows))]
        begins = [int(completion.nonzero()[0]) for _, completion in documents]
        places = range(-1, len(documents) - 1)
        mismatched = [
            tuple(
                torch.cat([own[:begin], other[begins[place] :]])[: split.max_length]
                for own, other in zip(document, documents[place], strict=True)
            )
            for document, begin, place in zip(documents, begins, places, strict=True)
        ]
        others = {f"KL_{name}": tensor for name, tensor in _padded(mismatched, self._pad).items()}
        return {**_padded(documents, self._pad), **others, "label": batch.desirable}

    def counted(self, batch: Mapping[str, torch.Tensor]) -> int:
        """The number of rows."""
        return len(batch["input_ids"])


_Document = tuple[torch.Tensor, ...]  # its ids, and 1 for each token that is trained: both int64 [tokens]


def _documents(batch: Batch, row: int) -> list[_Document]:
    """The documents of a row; the padding after them is one more."""
    positions = batch.position_ids[row]
    begins = [*torch.nonzero(positions == 0).flatten().tolist(), len(positions)]
    trained = (batch.labels[row] != IGNORED).long()
    return [(batch.input_ids[row, begin:end], trained[begin:end]) for begin, end in pairwise(begins)]


def _padded(documents: Sequence[_Document], pad: int) -> dict[str, torch.Tensor]:
    """As TRL names them: `input_ids`, `attention_mask` and `completion_mask`, int64 [documents, longest]."""
    ids, trained = zip(*documents, strict=True)
    columns = {"input_ids": ids, "attention_mask": map(torch.ones_like, ids), "completion_mask": trained}
    paddings = {"input_ids": pad}
    return {
        name: pad_sequence(list(column), batch_first=True, padding_value=paddings.get(name, 0))
        for name, column in columns.items()
    }
