"""Checkpoints of engine trl: the trainer's own, published whole, each with checkpoint.json.

    step-00000400/
        checkpoint.json                     see engines/checkpoint_directory.py
        adapter_model.safetensors           method lora: PEFT's
        model.safetensors                   method full: transformers', in one file or several
        pytorch_model_fsdp_0/               instead of both, where ranks shard the model: accelerate's
                                            (torch.distributed.checkpoint), adapters alone with method lora
        optimizer.pt                        or optimizer_0/
        scheduler.pt rng_state*.pth trainer_state.json      what a restart needs besides
        ...                                 configuration and tokenizer, which nothing reads

`best/`, and the only checkpoint of a run with `training.save_only_model`, have the weights alone. The trainer reads its
files without unpickling anything but tensors and numbers (torch.load with weights_only).
"""

from pathlib import Path

from accelerate.utils import save_fsdp_model
from transformers import Trainer

from hyperpod_ft import heartbeat, publish
from hyperpod_ft.engines import checkpoint_directory, newest_checkpoint
from hyperpod_ft.engines.interface import TrainingProgress, TrainingTask
from hyperpod_ft.engines.ranks import Ranks, Volume


class TrainerCheckpoints:
    """The checkpoints of one attempt; all ranks see one volume. Every method is collective."""

    def __init__(self, task: TrainingTask, ranks: Ranks) -> None:
        self.task, self.ranks = task, ranks
        self.directory = publish.partial_of(task.checkpoints / "trainer")
        """Where the trainer writes; it names its checkpoints there by their step."""

    def resume(self) -> TrainingProgress:
        """The progress of the newest complete, undamaged checkpoint; without one, step 0."""
        if self.ranks.is_rank_0:
            publish.remove_leftovers(self.task.checkpoints)
        progress = newest_checkpoint.find(self.task, self.ranks, Volume(self.ranks.is_rank_0, shared=True))
        if self.ranks.is_rank_0:
            checkpoint_directory.discard_later_best(self.task.best_checkpoint, progress.step if progress else 0)
        return progress or TrainingProgress()

    def publish(self, progress: TrainingProgress) -> None:
        """Publish what the trainer has written after the step."""
        written = self.directory / f"checkpoint-{progress.step}"
        checkpoint_directory.publish_written(
            self.task, self.ranks, progress, written, self.task.checkpoint(progress.step)
        )

    @heartbeat.during("save")
    def save_weights(self, trainer: Trainer, progress: TrainingProgress, final: Path) -> None:
        """Write and publish the trained weights alone."""
        written = self.directory / final.name
        if trainer.is_fsdp_enabled:  # where the trainer alone saves nothing
            plugin, lora = trainer.accelerator.state.fsdp_plugin, self.task.config.training.method == "lora"
            save_fsdp_model(plugin, trainer.accelerator, trainer.model, str(written), adapter_only=lora)
        else:
            trainer.save_model(str(written))
        checkpoint_directory.publish_written(self.task, self.ranks, progress, written, final)

    def finish(self) -> None:
        """Remove what the trainer has left where it writes."""
        if self.ranks.is_rank_0:
            publish.remove(self.directory)
