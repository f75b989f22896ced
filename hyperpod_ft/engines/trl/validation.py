"""Mean losses of the held-out rows, as TRL's trainer computes the loss of a batch."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Trainer

from hyperpod_ft import heartbeat
from hyperpod_ft.data.prepared import PreparedDataset
from hyperpod_ft.engines.batches import PackedSplit
from hyperpod_ft.engines.interface import TrainingTask
from hyperpod_ft.engines.ranks import Ranks
from hyperpod_ft.engines.trl.rows import RowCollator


class HeldOutRows:
    """The validation rows of a run, divided over its ranks."""

    def __init__(self, task: TrainingTask, directory: Path, ranks: Ranks, collator: RowCollator) -> None:
        """`directory`: of `held_out`."""
        self._split = PackedSplit(directory)
        self._rows_of = PreparedDataset(task.dataset).validation_sources() or {"": np.arange(len(self._split))}
        self._size, self._ranks, self._collator = task.config.training.micro_batch_size, ranks, collator

    @torch.no_grad()
    def losses(self, trainer: Trainer) -> tuple[float, dict[str, float]]:
        """The mean over the label tokens, or preferences, of all rows, and of each of several sources.

        It is equal on all ranks.
        """
        model: Any = trainer.model
        model.eval()
        sums = {name: self._sums(trainer, rows) for name, rows in self._rows_of.items()}
        trainer.log({})  # else TRL would keep its own metrics of these batches
        model.train()
        total, count = (sum(values) for values in zip(*sums.values(), strict=True))
        of_sources = {name: loss / tokens for name, (loss, tokens) in sums.items()} if len(sums) > 1 else {}
        return total / count, of_sources

    def _sums(self, trainer: Trainer, rows: NDArray[np.int64]) -> tuple[float, float]:
        """The loss summed over the label tokens, or preferences, of these rows, and their number.

        All ranks compute the same number of batches, because TRL gathers its metrics of each; one that has no rows of
        its own, which are -1, computes one of the first rows, and does not count it.
        """
        ranks = self._ranks.world_size
        passes = -(-len(rows) // (self._size * ranks))
        padded = np.full(passes * ranks * self._size, -1)
        padded[: len(rows)] = rows
        model: Any = trainer.model
        sums = torch.zeros(2, dtype=torch.float64, device=trainer.args.device)
        for chosen in padded.reshape(passes, ranks, self._size)[:, self._ranks.rank]:
            present = chosen[chosen >= 0]
            batch = self._collator.batch(self._split, present if present.size else rows[: self._size])
            counted = self._collator.counted(batch) if present.size else 0
            loss, _, _ = trainer.prediction_step(model, batch, prediction_loss_only=True)
            assert loss is not None
            heartbeat.beat()
            sums += torch.stack([loss.double() * counted, sums.new_tensor(counted)])
        total, count = trainer.accelerator.reduce(sums, "sum").tolist()
        return total, count
