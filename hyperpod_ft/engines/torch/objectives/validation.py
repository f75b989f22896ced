"""Forward passes alone over a split: the mean loss of the held-out rows, packed as in training."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from hyperpod_ft import heartbeat
from hyperpod_ft.data.prepared import PreparedDataset
from hyperpod_ft.engines.batches import Batch, PackedSplit, Seq2SeqBatch, held_out
from hyperpod_ft.engines.interface import TrainingTask
from hyperpod_ft.engines.torch.mesh import Meshes
from hyperpod_ft.engines.torch.objectives.objective import Objective
from hyperpod_ft.engines.torch.sharding.fully_sharded import reshard


@dataclass(frozen=True)
class SourceRows:
    """The validation rows of one source, and what sums over them are divided by."""

    name: str
    rows: NDArray[np.int64]
    count: int


@dataclass(frozen=True)
class Means:
    """The means over all validation rows, and over those of each source, by name, if there are several."""

    overall: list[float]
    of_sources: dict[str, list[float]]


class Validation:
    """The validation rows of a run, divided over the data-parallel ranks."""

    def __init__(
        self,
        split: PackedSplit,
        sources: Sequence[SourceRows],
        micro_batch_size: int,
        device: torch.device,
        meshes: Meshes,
    ) -> None:
        """`sources`: at least one."""
        self.split, self._sources = split, sources
        self._micro_batch_size, self._device, self._meshes = micro_batch_size, device, meshes

    @torch.no_grad()
    def means(
        self, module: nn.Module, sums: Callable[[Batch | Seq2SeqBatch], torch.Tensor], rows: int | None = None
    ) -> Means:
        """The means over the split, equal on all ranks; `sums` gives those of a batch, which is on the CPU: [sums].

        `rows`: only the first ones of each source, of a trial.
        """
        totals = [self._sum(module, sums, source.rows[:rows]) for source in self._sources]
        # also over tp ranks: on accelerators these may differ in the last bit, but all ranks must decide alike
        total = torch.tensor(totals, dtype=torch.float32).to(self._device)
        dist.all_reduce(total)
        of_sources = [[value / self._meshes.weights["tp"].size() for value in one] for one in total.tolist()]
        count = sum(source.count for source in self._sources)
        return Means(
            [sum(values) / count for values in zip(*of_sources, strict=True)],
            {
                source.name: [value / source.count for value in values]
                for source, values in zip(self._sources, of_sources, strict=True)
                if len(self._sources) > 1
            },
        )

    def _sum(
        self, module: nn.Module, sums: Callable[[Batch | Seq2SeqBatch], torch.Tensor], rows: NDArray[np.int64]
    ) -> list[float]:
        # Python's numbers add in 64 bits, which a device may not have
        parts = [
            sums(batch).tolist()
            for _, batch in forward_only(module, self.split, rows, self._micro_batch_size, self._meshes)
        ]
        return [sum(each) for each in zip(*parts, strict=True)]


def validation_of(task: TrainingTask, objective: Objective, device: torch.device, meshes: Meshes) -> Validation | None:
    """The validation; None when the dataset holds out no rows. Raises UserError as `held_out` does."""
    if (directory := held_out(task)) is None:
        return None
    split = objective.open(directory)
    rows_of = PreparedDataset(task.dataset).validation_sources() or {"": np.arange(len(split))}
    sources = [
        SourceRows(name, rows, objective.count(split, rows, f"{directory} {name}".strip()))
        for name, rows in rows_of.items()
    ]
    return Validation(split, sources, task.config.training.micro_batch_size, device, meshes)


def forward_only(
    module: nn.Module, split: PackedSplit, rows: NDArray[np.int64], micro_batch_size: int, meshes: Meshes
) -> Iterator[tuple[NDArray[np.int64], Batch | Seq2SeqBatch]]:
    """This data-parallel rank's part of `rows`, in micro batches, with the numbers of their rows.

    There is no dropout, so the state of random generators does not change. All ranks get the same number of micro
    batches, because they gather weights together; missing rows are -1, a row without labels.
    """
    ranks = meshes.tokens["dp"].size()
    passes = -(-len(rows) // (micro_batch_size * ranks))
    padded = np.full(passes * micro_batch_size * ranks, -1)
    padded[: len(rows)] = rows
    module.eval()
    for chosen in padded.reshape(passes, ranks, micro_batch_size)[:, meshes.tokens.get_local_rank("dp")]:
        heartbeat.beat()
        yield chosen, split.batch(chosen)
    module.train()
    reshard(module)  # zero2 keeps layers gathered until a backward pass, which does not come here
