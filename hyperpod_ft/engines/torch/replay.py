"""A step of a training, computed again by one process, from the newest checkpoint before it."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from hyperpod_ft.engines import newest_checkpoint
from hyperpod_ft.engines.interface import TrainingTask
from hyperpod_ft.engines.ranks import Ranks
from hyperpod_ft.engines.torch import devices
from hyperpod_ft.engines.torch.loop import TrainingLoop, training_loop
from hyperpod_ft.engines.torch.steps import Step


@dataclass(frozen=True)
class ReplayedStep:
    """`begun`: the step of the checkpoint that it was computed from; 0: the base model.

    `weights`: the norm of what the trained weights differ from those of the checkpoint after the step, relative to
    them; None without such a checkpoint.
    """

    begun: int
    step: Step
    device: str
    weights: float | None


def replay(task: TrainingTask, step: int, scratch: Path) -> ReplayedStep:
    """Compute step `step` of a training whose layout has one rank again, in this process.

    Reads the checkpoints of `task.directory`, and writes to `scratch`, an empty directory, alone. Raises UserError as
    `engine.train` does.
    """
    before, after = (replace(task, directory=scratch / name, compile_cache=scratch) for name in ("before", "after"))
    for found, directory in task.checkpoints_by_step().items():
        target = before if found < step else after
        if found <= step:
            target.checkpoints.mkdir(parents=True, exist_ok=True)
            target.checkpoint(found).symlink_to(directory)
    if task.reference_log_probabilities.is_dir():  # they are measured again if they are of other rows
        shutil.copytree(task.reference_log_probabilities, before.reference_log_probabilities)
    ranks = Ranks(0, 1, 0, dist.HashStore())
    with training_loop(before, ranks) as loop:
        begun = loop.state.resume(loop.total_steps).step
        for number in range(begun + 1, step):
            loop.step(number, [])
        replayed = loop.step(step, [])
        recorded = newest_checkpoint.find(after, ranks, loop.state.volume)
        weights = _difference(loop, after.checkpoint(step)) if recorded else None
    return ReplayedStep(begun, replayed, loop.device.type, weights)


def _difference(loop: TrainingLoop, checkpoint: Path) -> float:
    training = loop.task.config.training
    dtype = devices.DTYPES[training.weights_dtype] if training.save_only_model else torch.float32
    here = loop.trained_weights.state(dtype)
    there = {name: torch.empty_like(tensor) for name, tensor in here.items()}
    dcp.load({"model": there}, storage_reader=dcp.FileSystemReader(checkpoint))
    norms = [(torch.linalg.vector_norm(here[name].double() - there[name].double()), there[name]) for name in here]
    difference = torch.stack([norm for norm, _ in norms]).norm()
    return float(difference / torch.stack([torch.linalg.vector_norm(one.double()) for _, one in norms]).norm())
