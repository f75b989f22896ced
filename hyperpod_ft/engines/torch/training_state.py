"""The state of a training run: when and how much of it a checkpoint holds, and how training resumes from one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hyperpod_ft import heartbeat, publish
from hyperpod_ft.checkpoint.sharded import description
from hyperpod_ft.checkpoint.sharded.description import RankDegrees
from hyperpod_ft.engines import checkpoint_directory, newest_checkpoint
from hyperpod_ft.engines.interface import TrainingProgress, TrainingTask
from hyperpod_ft.engines.ranks import Ranks
from hyperpod_ft.engines.torch import devices
from hyperpod_ft.engines.torch.checkpoints import Checkpoints
from hyperpod_ft.engines.torch.memory_checkpoints import MemoryCheckpoint, MemoryCheckpoints
from hyperpod_ft.engines.torch.optimizer.adamw import AdamW
from hyperpod_ft.engines.torch.sharding.trained_weights import TrainedWeights
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.results import metrics


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
        self._memory = None
        if task.memory:
            self._memory = MemoryCheckpoints(task, task.memory, ranks, device, self._tensors())

    def save(self, progress: TrainingProgress, last: bool, wanted: bool) -> None:
        """Save what is due after a step: the best weights, a checkpoint to resume from, and one in memory.

        `last`: of the training; `wanted`: the checkpoint is due whatever the step's number. Raises UserError when it
        cannot be written, RuntimeError when ranks that hold the same weights differ.
        """
        training = self._task.config.training
        best = training.keep_best and progress.best_step == progress.step
        due = last if training.save_only_model else wanted or progress.step % training.save_every_steps == 0
        if self._memory and wanted:
            self._memory.finish()  # before the checkpoint that ends the training, for which ranks wait for each other
        if best or due:
            self._weights.check_replicas(progress.step)
        if best:
            self._checkpoints.save(self._task.best_checkpoint, self._exported(), progress)
        if due:
            state = self._exported() if training.save_only_model else self._tensors()
            self._checkpoints.save(self._task.checkpoint(progress.step), state, progress)
        if self._memory and not wanted and self._memory.is_due(progress.step):
            if self._ranks.is_rank_0:
                with heartbeat.during("save"):
                    publish.fsync(self._task.metrics_path)  # the rows are not lost with this node
            self._memory.save(progress, self._tensors())

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is due after this step by its number."""
        training = self._task.config.training
        on_volume = not training.save_only_model and step % training.save_every_steps == 0
        return on_volume or (self._memory is not None and self._memory.is_due(step))

    def finish(self) -> None:
        """Wait for the checkpoint that a thread writes. Raises UserError when that fails."""
        self._checkpoints.finish()

    def resume(self, steps: int) -> TrainingProgress:
        """Load the newest complete checkpoint of a training run of `steps` steps; without one, start at step 0.

        Where other ranks wrote it, the generators begin anew: only dropout of the model's own type draws from them.
        Raises RuntimeError when nodes have different ones, UserError when memory checkpoints cannot be kept.
        """
        if self.volume.leads:
            publish.remove_leftovers(self._task.checkpoints)
        progress = newest_checkpoint.find(self._task, self._ranks, self.volume) or TrainingProgress()
        if progress.step == steps or progress.stopped_early:
            # training is complete; the checkpoint may hold the weights alone
            return progress
        in_memory = self._newer_in_memory(progress.step)
        begun = in_memory.progress if in_memory else progress
        if self.volume.leads:
            checkpoint_directory.discard_later_best(self._task.best_checkpoint, begun.step)
        tensors = self._tensors()
        if self._memory:
            self._memory.begin(in_memory, tensors)
        if not begun.step:
            return begun
        directory = self._task.checkpoint(begun.step)
        moved = not in_memory and not self._has_generators(directory)
        if moved:
            del tensors["random"]
        if not in_memory:
            self._checkpoints.load(directory, tensors)
        for names in self._weights.buckets:
            self._weights.use_masters(names)
        self._optimizer.steps = begun.step
        if moved:
            torch.manual_seed(torch.initial_seed() + (begun.step << 32))
        else:
            restore_random_state(tensors["random"], self._ranks.rank, self._device)
        return replace(begun, resumed_from=(*begun.resumed_from, begun.step))

    def _newer_in_memory(self, step: int) -> MemoryCheckpoint | None:
        """What the nodes have in memory after `step`, the volume's.

        None if the volume lacks its best weights, which a thread had not saved, or the rows of its steps.
        """
        found = self._memory.newest(step) if self._memory else None
        if found:
            lacks_best = self.volume.leads and not self._has_best(found.progress)
            lacks_rows = self._ranks.is_rank_0 and not self._has_rows(found.progress)
            if any(self._ranks.gather("memory/lacks", lacks_best or lacks_rows)):
                return None
        if found and self._ranks.is_rank_0:
            print(f"train: step {found.progress.step} is in the nodes' memory", flush=True)
        return found

    def _has_best(self, progress: TrainingProgress) -> bool:
        """Whether the best weights so far were saved, or those of a step that training will do again."""
        if not self._task.config.training.keep_best or not progress.best_step:
            return True
        try:
            saved = description.read(self._task.best_checkpoint).step
        except UserError:
            return False
        return saved == progress.best_step or saved > progress.step

    def _has_rows(self, progress: TrainingProgress) -> bool:
        """Whether metrics.jsonl has the rows of all steps so far: those of a node that returns may have been lost."""
        logged = progress.step - progress.step % self._task.config.training.log_every_steps
        return metrics.last_step(self._task.metrics_path) >= logged

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
