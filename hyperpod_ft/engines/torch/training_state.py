"""The state of a training run: when and how much of it a checkpoint holds, and how training resumes from one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hyperpod_ft import publish
from hyperpod_ft.checkpoint.sharded import description
from hyperpod_ft.checkpoint.sharded.description import RankDegrees
from hyperpod_ft.engines import checkpoint_directory, newest_checkpoint
from hyperpod_ft.engines.interface import TrainingProgress, TrainingTask
from hyperpod_ft.engines.ranks import Ranks
from hyperpod_ft.engines.torch import devices
from hyperpod_ft.engines.torch.checkpoints import Checkpoints
from hyperpod_ft.engines.torch.optimizer.adamw import AdamW
from hyperpod_ft.engines.torch.sharding.trained_weights import TrainedWeights


class TrainingState:
    """Weights, optimizer and random generators of a rank, saved to and resumed from the run's checkpoints.

    Its methods are collective.
    """

    def __init__(
        self, task: TrainingTask, ranks: Ranks, device: torch.device, weights: TrainedWeights, optimizer: AdamW
    ) -> None:
        self._task, self._ranks, self._device = task, ranks, device
        self._weights, self._optimizer = weights, optimizer
        self._checkpoints = Checkpoints(task, ranks, device, weights)
        self.volume = self._checkpoints.volume

    def save(self, progress: TrainingProgress, last: bool, wanted: bool) -> None:
        """Save what is due after a step: the best weights, and a checkpoint to resume from.

        `last`: of the training; `wanted`: the checkpoint is due whatever the step's number. Raises UserError when it
        cannot be written, RuntimeError when ranks that hold the same weights differ.
        """
        training = self._task.config.training
        best = training.keep_best and progress.best_step == progress.step
        due = last if training.save_only_model else wanted or self.saves_after(progress.step)
        if best or due:
            self._weights.check_replicas(progress.step)
        if best:
            self._checkpoints.save(self._task.best_checkpoint, self._exported(), progress)
        if due:
            state = self._exported() if training.save_only_model else self._tensors()
            self._checkpoints.save(self._task.checkpoint(progress.step), state, progress)

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is due after this step by its number."""
        training = self._task.config.training
        return not training.save_only_model and step % training.save_every_steps == 0

    def finish(self) -> None:
        """Wait for the checkpoint that a thread writes. Raises UserError when that fails."""
        self._checkpoints.finish()

    def resume(self, steps: int) -> TrainingProgress:
        """Load the newest complete checkpoint of a training run of `steps` steps; without one, start at step 0.

        Where other ranks wrote it, the generators begin anew: only dropout of the model's own type draws from them.
        Raises RuntimeError when nodes have different ones.
        """
        if self.volume.leads:
            publish.remove_leftovers(self._task.checkpoints)
        progress = newest_checkpoint.find(self._task, self._ranks, self.volume)
        if self.volume.leads:
            checkpoint_directory.discard_later_best(self._task.best_checkpoint, progress.step if progress else 0)
        if progress is None:
            return TrainingProgress()
        if progress.step == steps or progress.stopped_early:
            # training is complete; the checkpoint may hold the weights alone
            return progress
        directory = self._task.checkpoint(progress.step)
        tensors = self._tensors()
        moved = not self._has_generators(directory)
        if moved:
            del tensors["random"]
        self._checkpoints.load(directory, tensors)
        for names in self._weights.buckets:
            self._weights.use_masters(names)
        self._optimizer.steps = progress.step
        if moved:
            torch.manual_seed(torch.initial_seed() + (progress.step << 32))
        else:
            restore_random_state(tensors["random"], self._ranks.rank, self._device)
        return replace(progress, resumed_from=(*progress.resumed_from, progress.step))

    def _has_generators(self, directory: Path) -> bool:
        """Whether a checkpoint has this rank's generators: it was written with the same degrees and kind of device."""
        own = RankDegrees.model_validate(self._task.layout.degrees, from_attributes=True)
        if description.read(directory).degrees != own:
            return False
        saved, rank = self._checkpoints.names(directory), self._ranks.rank
        return all(f"random.{rank}.{name}" in saved for name in random_state(rank, self._device)[str(rank)])

    def _exported(self) -> dict[str, Any]:
        """The trained weights in `weights_dtype`."""
        return {"model": self._weights.state(devices.DTYPES[self._task.config.training.weights_dtype])}

    def _tensors(self) -> dict[str, Any]:
        """All that a restart needs, in tensors that share memory with model and optimizer."""
        return {
            "model": self._weights.state(),
            "optimizer": self._optimizer.state(),
            "random": random_state(self._ranks.rank, self._device),
        }


def random_state(rank: int, device: torch.device) -> dict[str, Any]:
    """This rank's generator states."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state()
    return {str(rank): states}


def restore_random_state(state: dict[str, Any], rank: int, device: torch.device) -> None:
    """Restore the generator states that `random_state` returned."""
    states = state[str(rank)]
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states["device"])
