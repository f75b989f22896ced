"""What the kit does after each step of TRL's trainer: report, validate, check the loss, and have checkpoints written.

The trainer's own schedules of these are off. It calls `on_log` after each step, whatever comes next is asked for there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hyperpod_ft import heartbeat
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sections.training import learning_rate
from hyperpod_ft.engines import sanity
from hyperpod_ft.engines.interface import TrainingProgress
from hyperpod_ft.engines.metrics import MetricsLog
from hyperpod_ft.engines.ranks import flags, stop_signal
from hyperpod_ft.engines.trl.checkpoints import TrainerCheckpoints
from hyperpod_ft.engines.trl.prompts import first_answer
from hyperpod_ft.engines.trl.validation import HeldOutRows
from hyperpod_ft.runs.results import sampled_answers
from hyperpod_ft.runs.results.metrics import OF_SOURCE

# Reported otherwise, or not again from the beginning after a restart.
_NOT_METRICS = {"loss", "grad_norm", "learning_rate", "epoch", "num_tokens", "step_time"}


def has_known_scale(config: RunConfig) -> bool:
    """Whether the loss is in nats, as sanity.check takes it.

    Those of rewards and of single preferences are not, nor those of beta squared.
    """
    losses = config.trl.get("loss_type", ())
    training = config.training
    scaled = training.samples_answers or training.objective == "kto" or "loss_weights" in config.trl
    return not (scaled or "ipo" in losses or "sppo_hard" in losses)


class StepsFollower(TrainerCallback):
    """Follows the steps of one attempt, on every rank.

    `stop`: the signal to stop for; 0: none.
    """

    trainer: Trainer
    log: MetricsLog
    validation: HeldOutRows | None
    signals: Sequence[int]

    def __init__(self, checkpoints: TrainerCheckpoints, progress: TrainingProgress, vocabulary: int | None) -> None:
        self.checkpoints, self.progress, self.vocabulary = checkpoints, progress, vocabulary
        self.training = checkpoints.task.config.training
        self.stop = 0
        # of rows, TRL counts those of an attempt; of sampled answers, those over all restarts
        self._tokens_before = (progress.tokens or 0) if checkpoints.task.config.dataset.images else 0

    def follow(self, trainer: Trainer, log: MetricsLog, validation: HeldOutRows | None, signals: Sequence[int]) -> None:
        """To be called before the training begins; the trainer is made with its callbacks.

        `signals`: those that have arrived so far.
        """
        self.trainer, self.log, self.validation, self.signals = trainer, log, validation, signals

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.training.validate_every_steps and state.global_step == 0:
            loss, of_sources = self._validate()
            measured = {f"base_{name}": value for name, value in of_sources.items()}
            self.progress = replace(
                self.progress, base_validation_loss=loss, metrics={**self.progress.metrics, **measured}
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **passed: Any
    ) -> None:
        """Set the step's learning rate."""
        rate = learning_rate(self.training, state.global_step + 1, state.max_steps)
        for group in passed["optimizer"].param_groups:
            group["lr"] = rate

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        received = torch.tensor(flags(self.signals), device=args.device)
        self.stop = self.stop or stop_signal(self.trainer.accelerator.reduce(received, "sum").tolist())

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **passed: Any) -> None:
        """Report the step, and ask for what follows it.

        Raises UserError, on every rank, when loss or gradients are not finite, or training diverges.
        """
        logs: Mapping[str, float] = passed["logs"]
        state.log_history.clear()  # every checkpoint would have all steps
        if "loss" not in logs:
            return
        step = state.global_step
        sanity.check_finite(step, logs["loss"], logs["grad_norm"])
        others = {name: value for name, value in logs.items() if name not in _NOT_METRICS and value is not None}
        self.progress = self.log.advance(self.progress, logs["loss"], others)
        # other rows have the same number of tokens each
        counts = self.training.samples_answers or self.checkpoints.task.config.dataset.images
        if counts and "num_tokens" in logs:
            tokens = self._tokens_before + int(logs["num_tokens"])  # of all ranks
            self.progress = replace(self.progress, tokens=tokens)
        loss = None
        every, ends = self.training.validate_every_steps, step == state.max_steps
        if self.validation and (ends or (every and step % every == 0)):
            loss, of_sources = self._validate()
            others |= of_sources
            self.progress = self.progress.validated(loss, self.training.early_stopping_patience, of_sources)
        if self.checkpoints.ranks.is_rank_0:
            rate = learning_rate(self.training, step, state.max_steps)
            self.log.write(self.progress, rate, logs["grad_norm"], loss, others)
            functions = getattr(self.trainer, "reward_funcs", ())
            if functions and sampled_answers.is_kept(step, state.max_steps):
                sampled_answers.keep(self.checkpoints.task.sampled_answers, first_answer(step, functions))
        if has_known_scale(self.checkpoints.task.config):
            sanity.check(self.training, self.progress, state.max_steps, self.vocabulary)
        if self.training.keep_best and self.progress.best_step == step:
            self.checkpoints.save_weights(self.trainer, self.progress, self.checkpoints.task.best_checkpoint)
        ends = ends or self.progress.stopped_early
        due = ends or self.stop or step % self.training.save_every_steps == 0
        control.should_save = bool(due) and not self.training.save_only_model
        if control.should_save:
            heartbeat.beat("save")
        control.should_training_stop = bool(ends or self.stop)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.checkpoints.publish(self.progress)
        heartbeat.beat("step")

    def _validate(self) -> tuple[float, dict[str, float]]:
        """The validation loss, and that of each source by its name in metrics.jsonl, if there are several."""
        assert self.validation is not None
        with self.log.validating():
            loss, of_sources = self.validation.losses(self.trainer)
        return loss, {f"{OF_SOURCE}{name}": value for name, value in of_sources.items()}
