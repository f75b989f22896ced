"""The checkpoint that training resumes from: the newest one that every node has complete and undamaged."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from hyperpod_ft.checkpoint.sharded import dcp, description
from hyperpod_ft.engines.checkpoint_directory import why_unusable
from hyperpod_ft.engines.interface import TrainingProgress, TrainingTask
from hyperpod_ft.engines.ranks import Ranks, Volume
from hyperpod_ft.errors import UserError

_PROGRESS = TypeAdapter(TrainingProgress)  # JSON has no tuples


def find(task: TrainingTask, ranks: Ranks, volume: Volume) -> TrainingProgress | None:
    """The progress of the newest checkpoint that every node has complete and undamaged; prints why it ignores others.

    Collective: one rank looks at each volume, and all its ranks read a part of the files. Raises RuntimeError when
    nodes that share no volume have complete checkpoints, but not the same: training does not start again then, and
    the next attempt may get the files that are missing here.
    """
    complete = list(_complete_checkpoints(task)) if volume.leads else None
    by_volume = [
        {(found["step"], found["digest"]): found["progress"] for found in of_volume}
        for of_volume in ranks.gather("restore/complete", complete)
        if of_volume is not None
    ]
    common = [key for key in by_volume[0] if all(key in other for other in by_volume)]
    elsewhere = sorted({step for of_volume in by_volume for step, digest in of_volume if (step, digest) not in common})
    if ranks.is_rank_0:
        for step in elsewhere:
            _print_ignored(task.checkpoint(step), "not every node has all of its files")
    for step, digest in common:
        directory = task.checkpoint(step)
        reasons = ranks.gather(f"restore/{step}/damaged", _why_damaged(directory, ranks, volume, task))
        if not any(reasons):
            return _PROGRESS.validate_python(by_volume[0][step, digest])
        if ranks.is_rank_0:
            _print_ignored(directory, next(filter(None, reasons)))
    if elsewhere:
        raise RuntimeError(
            f"{task.checkpoint(elsewhere[-1])} is complete on some nodes only, and no checkpoint on all of them:"
            " training does not start again at step 0"
        )
    return None


def _complete_checkpoints(task: TrainingTask) -> Iterator[dict[str, Any]]:
    """The complete checkpoints of this run on this volume, the newest first; prints why it ignores others.

    `digest`: of all files of a checkpoint. Checks sizes alone; `_why_damaged` reads the files.
    """
    for directory in reversed(task.checkpoints_by_step().values()):
        reason = why_unusable(directory, task.fingerprint)
        if not reason:
            reason = _why_unreadable(directory)
        if reason:
            _print_ignored(directory, reason)
            continue
        described = description.read(directory)
        yield {"step": described.step, "digest": described.digest, "progress": described.progress}


def _why_damaged(directory: Path, ranks: Ranks, volume: Volume, task: TrainingTask) -> str:
    """Why this rank's part of a complete checkpoint is damaged: the ranks on a volume share the reading."""
    recorded = description.read(directory).sha256
    part, parts = ranks.rank, ranks.world_size
    if not volume.shared:
        part, parts = ranks.local_rank, ranks.world_size // task.layout.degrees.nodes
    return description.why_damaged(directory, {name: recorded[name] for name in sorted(recorded)[part::parts]})


def _print_ignored(directory: Path, reason: str) -> None:
    print(f"train: ignoring checkpoint {directory.name}: {reason}", flush=True)


def _why_unreadable(directory: Path) -> str:
    # DCP unpickles each index, so it must not get one with anything else in it
    try:
        for index in sorted(directory.rglob(dcp.INDEX)):
            dcp.index(index.parent)
    except UserError as error:
        return str(error)
    return ""
