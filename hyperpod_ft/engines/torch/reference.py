"""Reference log-probabilities: those of a run's preferences before training, measured once and stored in the run.

The reference of DPO is the model that training begins with. Its log-probabilities do not change, so one forward pass
over the rows that the run trains and validates on, before step 1, serves all epochs, validations and restarts. No copy
of the weights is needed, nor any switch: before step 1, adapters add nothing.
"""

import json
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hyperpod_ft import publish
from hyperpod_ft.digests import files_below, text_sha256
from hyperpod_ft.engines.batches import Batch
from hyperpod_ft.engines.processes import Processes
from hyperpod_ft.engines.torch.evaluation import forward_only
from hyperpod_ft.engines.torch.mesh import Meshes
from hyperpod_ft.engines.torch.model import compiling, language_model
from hyperpod_ft.engines.torch.preference_rows import Floats, PreferenceSplit, Rows
from hyperpod_ft.runs.run import Run

_PROGRESS_SECONDS = 10.0
_INPUTS = "inputs.sha256"


Wanted = Mapping[str, tuple[PreferenceSplit, Rows]]  # splits by name, and those of their rows that are used


def add(
    run: Run,
    processes: Processes,
    meshes: Meshes,
    device: torch.device,
    module: nn.Module,
    wanted: Wanted,
) -> None:
    """Give the splits their reference log-probabilities: those stored in the run, or else measured now and stored.

    They are measured by `module` as it is. Collective.
    """
    known = stored(run, wanted) if processes.leads else None
    if not processes.gather("reference/stored", known is not None)[0]:
        training = run.config.training
        compiled = compiling.compiles(training, device)

        def log_probabilities(batch: Batch) -> torch.Tensor:
            found: torch.Tensor = -module(**language_model.inputs(batch, device, compiled, by_document=True))
            return found

        known = {
            name: _measure(
                module,
                split,
                rows,
                training.micro_batch_size,
                meshes,
                log_probabilities,
                name if processes.leads else None,
            )
            for name, (split, rows) in wanted.items()
        }
        if processes.leads:
            store(run, known)
    for name, (split, _) in wanted.items():
        # the same on every rank and after a restart: on accelerators, tp ranks may differ in the last bit
        values = torch.empty(split.documents, device=device)
        if processes.leads and known:
            values.copy_(torch.from_numpy(known[name]))
        dist.broadcast(values, src=0)
        split.reference = values.cpu().numpy()


@torch.no_grad()
def _measure(
    module: nn.Module,
    split: PreferenceSplit,
    rows: Rows,
    micro_batch_size: int,
    meshes: Meshes,
    log_probabilities: Callable[[Batch], torch.Tensor],
    reported_as: str | None,
) -> Floats:
    """The log-probabilities of the documents of `rows`, fp32 [documents of the split]; those of other rows are 0.

    `log_probabilities` gives those of a batch, fp32 [documents].
    """
    parts: list[tuple[Rows, torch.Tensor]] = []
    reported = time.monotonic()
    for chosen, batch in forward_only(module, split, rows, micro_batch_size, meshes):
        parts.append((split.documents_of(chosen), log_probabilities(batch)))
        if reported_as and time.monotonic() - reported > _PROGRESS_SECONDS:
            reported = time.monotonic()
            done = min(len(rows), len(parts) * micro_batch_size * meshes.tokens["dp"].size())
            print(f"train: reference of {done:,} of {len(rows):,} {reported_as} rows", flush=True)
    numbers, values = zip(*parts, strict=True)
    found = torch.zeros(split.documents, device=values[0].device)
    found[torch.from_numpy(np.concatenate(numbers)).to(found.device)] = torch.cat(values)
    dist.all_reduce(found, group=meshes.tokens.get_group("dp"))
    return np.asarray(found.cpu().numpy())


def stored(run: Run, wanted: Wanted) -> dict[str, Floats] | None:
    """None when they are missing, damaged, or of another model or other rows."""
    try:
        if (run.reference / _INPUTS).read_text(encoding="utf-8") != _inputs(run):
            return None
        known = {name: np.load(run.reference / f"{name}.npy", allow_pickle=False) for name in wanted}
    except (OSError, ValueError, EOFError):
        return None
    for name, (split, _) in wanted.items():
        values = known[name]
        if values.dtype != np.float32 or values.shape != (split.documents,) or not np.isfinite(values).all():
            return None
    return known


def store(run: Run, known: Mapping[str, Floats]) -> None:
    with publish.new_directory(run.reference) as partial:
        for name, values in known.items():
            np.save(partial / f"{name}.npy", values)
        (partial / _INPUTS).write_text(_inputs(run), encoding="utf-8")


def _inputs(run: Run) -> str:
    """What identifies the model and the rows: a model that is fetched again may be another under the same name."""
    files = [path for directory in (run.base_model, run.dataset_path) for path in files_below(directory)]
    found = [(str(path.relative_to(run.root)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return text_sha256(json.dumps(found))
