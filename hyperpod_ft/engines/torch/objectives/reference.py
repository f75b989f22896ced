"""Reference log-probabilities: those of a run's preferences before training, measured once and stored in the run.

The reference of DPO is the model that training begins with. Its log-probabilities do not change, so one forward pass
over the rows that the run trains and validates on, before step 1, serves all epochs, validations and restarts. No copy
of the weights is needed, nor any switch: before step 1, new adapters add nothing, and one that training continues is
part of that model.
"""

import contextlib
import json
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from hyperpod_ft import publish
from hyperpod_ft.digests import files_below, text_sha256
from hyperpod_ft.engines.batches import Batch, PreferenceSplit, Seq2SeqBatch
from hyperpod_ft.engines.interface import TrainingTask
from hyperpod_ft.engines.ranks import Ranks
from hyperpod_ft.engines.torch import devices
from hyperpod_ft.engines.torch.mesh import Meshes
from hyperpod_ft.engines.torch.model import language_model
from hyperpod_ft.engines.torch.objectives.validation import forward_only

_PROGRESS_SECONDS = 10.0
_PASSES_PER_PART = 64  # of a rank, after which what was measured is stored
_INPUTS = "inputs.sha256"

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]
Wanted = Mapping[str, tuple[PreferenceSplit, Rows]]  # splits by name, and those of their rows that are used


def add(
    task: TrainingTask,
    ranks: Ranks,
    meshes: Meshes,
    device: torch.device,
    module: nn.Module,
    wanted: Wanted,
) -> None:
    """Give the splits their reference log-probabilities: those stored in the run, and what is missing, measured now.

    They are measured by `module` as it is, and stored part by part, so that an interrupted pass continues. Collective.
    """
    known = stored(task, wanted) if ranks.is_rank_0 else {}
    for name, (split, _) in wanted.items():
        split.reference = known.get(name, np.full(split.documents, np.nan, np.float32))
        _broadcast_from_rank_0(split, device)
    training = task.config.training
    compiled = devices.compiles(training, device)

    def log_probabilities(batch: Batch | Seq2SeqBatch) -> torch.Tensor:
        assert isinstance(batch, Batch)
        found: torch.Tensor = -module(**language_model.inputs(batch, device, compiled, by_document=True))
        return found

    reported = time.monotonic()
    rows_of_part = _PASSES_PER_PART * training.micro_batch_size * meshes.tokens["dp"].size()
    for name, (split, rows) in wanted.items():
        missing = split.without_reference(rows)
        for first in range(0, len(missing), rows_of_part):
            part = missing[first : first + rows_of_part]
            _measure(module, split, part, training.micro_batch_size, meshes, log_probabilities)
            if ranks.is_rank_0:
                store(task, {each: whole.reference for each, (whole, _) in wanted.items()})
            if ranks.is_rank_0 and time.monotonic() - reported > _PROGRESS_SECONDS:
                reported = time.monotonic()
                done = len(rows) - len(missing) + first + len(part)
                print(f"train: reference of {done:,} of {len(rows):,} {name} rows", flush=True)
        # on accelerators, tp ranks may differ in the last bit
        _broadcast_from_rank_0(split, device)


def _broadcast_from_rank_0(split: PreferenceSplit, device: torch.device) -> None:
    """Make the references of a split on all ranks those on rank 0, as they will be after a restart."""
    values = torch.from_numpy(split.reference).to(device)
    dist.broadcast(values, src=0)
    split.reference = values.cpu().numpy()


@torch.no_grad()
def _measure(
    module: nn.Module,
    split: PreferenceSplit,
    rows: Rows,
    micro_batch_size: int,
    meshes: Meshes,
    log_probabilities: Callable[[Batch | Seq2SeqBatch], torch.Tensor],
) -> None:
    """Set the references of the documents of `rows`; `log_probabilities` gives those of a batch, fp32 [documents]."""
    parts: list[tuple[Rows, torch.Tensor]] = []
    for chosen, batch in forward_only(module, split, rows, micro_batch_size, meshes):
        parts.append((split.documents_of(chosen), log_probabilities(batch)))
    numbers, values = zip(*parts, strict=True)
    found = torch.zeros(split.documents, device=values[0].device)
    found[torch.from_numpy(np.concatenate(numbers)).to(found.device)] = torch.cat(values)
    dist.all_reduce(found, group=meshes.tokens.get_group("dp"))
    measured = split.documents_of(rows)
    split.reference[measured] = found.cpu().numpy()[measured]


def stored(task: TrainingTask, wanted: Wanted) -> dict[str, Floats]:
    """What was measured so far, by split; nothing of another model or other rows, nor of a damaged file."""
    known = {}
    with contextlib.suppress(OSError):
        if (task.reference_log_probabilities / _INPUTS).read_text(encoding="utf-8") != _inputs(task):
            return {}
        for name, (split, _) in wanted.items():
            with contextlib.suppress(OSError, ValueError, EOFError):
                values = np.load(task.reference_log_probabilities / f"{name}.npy", allow_pickle=False)
                if values.dtype == np.float32 and values.shape == (split.documents,):
                    known[name] = values
    return known


def store(task: TrainingTask, known: Mapping[str, Floats]) -> None:
    """`known`: fp32 [documents] by split, NaN where nothing was measured."""
    measured = sum(int(np.isfinite(values).sum()) for values in known.values())
    with publish.new_directory(task.reference_log_probabilities) as partial:
        for name, values in known.items():
            np.save(partial / f"{name}.npy", values)
        (partial / _INPUTS).write_text(_inputs(task), encoding="utf-8")
        (partial / task.reference_count.name).write_text(f"{measured}\n", encoding="utf-8")


def _inputs(task: TrainingTask) -> str:
    """What identifies the model and the rows, on every machine that has them: when files were written does not.

    The names of their directories say what was downloaded and how it was prepared.
    """
    files = [(path, above.parent) for above in (task.base_model, task.dataset) for path in files_below(above)]
    return text_sha256(json.dumps([(path.relative_to(above).as_posix(), path.stat().st_size) for path, above in files]))
