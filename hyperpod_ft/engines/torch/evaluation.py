"""The validation loss: mean cross entropy over the label tokens of the held-out rows, packed as in training."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hyperpod_ft.data.packing import IGNORED
from hyperpod_ft.engines.batches import Batch, PackedSplit, PairedBatch
from hyperpod_ft.engines.torch.mesh import Meshes
from hyperpod_ft.engines.torch.sharding.fully_sharded import reshard
from hyperpod_ft.errors import UserError


class Evaluation:
    """The validation rows of a run, divided over the data-parallel ranks."""

    def __init__(self, directory: Path, micro_batch_size: int, device: torch.device, meshes: Meshes) -> None:
        """Raises UserError when the rows are damaged, or none of their tokens counts in the loss."""
        self._rows, self._device, self._meshes = PackedSplit(directory), device, meshes
        count, ranks = len(self._rows), meshes.tokens["dp"].size()
        self._tokens = self._rows.label_tokens(np.arange(count))
        if not self._tokens:
            raise UserError(
                f"{directory}: no token of the validation rows counts in the loss", "check dataset.loss_on and the data"
            )
        # every rank computes as many micro batches, since they gather weights together: -1 is a row without labels
        passes = -(-count // (micro_batch_size * ranks))
        padded = np.full(passes * micro_batch_size * ranks, -1)
        padded[:count] = np.arange(count)
        self._micro_batches = padded.reshape(passes, ranks, micro_batch_size)[:, meshes.tokens.get_local_rank("dp")]

    @torch.no_grad()
    def loss(self, module: nn.Module, summed_loss: Callable[[Batch | PairedBatch], torch.Tensor]) -> float:
        """The mean loss, equal on all ranks; `summed_loss` sums that of a batch, on the CPU, over its label tokens.

        Leaves generators as they are: nothing is dropped out.
        """
        module.eval()
        total = torch.zeros((), dtype=torch.float64)
        for rows in self._micro_batches:
            total += summed_loss(self._batch(rows)).double().cpu()
        module.train()
        reshard(module)  # zero2 keeps layers gathered until a backward pass, which does not come here
        # over all ranks, tp too: on accelerators its ranks may differ in the last bit, and they must decide alike
        total = total.float().to(self._device)
        dist.all_reduce(total)
        return float(total) / self._meshes.weights["tp"].size() / self._tokens

    def _batch(self, rows: np.ndarray) -> Batch | PairedBatch:
        batch = self._rows.batch(np.maximum(rows, 0))
        batch.labels[torch.from_numpy(rows < 0)] = IGNORED
        return batch
