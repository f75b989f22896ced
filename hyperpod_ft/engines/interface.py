"""The interface of an engine: what it is asked to train, how far it is, and the result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hyperpod_ft.runs.results.expert_load import Loads
from hyperpod_ft.runs.training_paths import TrainingPaths

if TYPE_CHECKING:
    from hyperpod_ft.config.run_config import RunConfig
    from hyperpod_ft.engines.ranks import Ranks
    from hyperpod_ft.planning.layout import Layout


@dataclass(frozen=True)
class TrainingTask(TrainingPaths):
    """All that an engine knows of a run: the settings, what is trained on what, and where the result goes."""

    config: RunConfig
    layout: Layout
    fingerprint: str  # of the training; only checkpoints that have it are used
    base_model: Path
    dataset: Path  # packed rows: split `train`, and `validation` if some are held out
    documents_per_row: float | None  # on average over the training rows
    directory: Path
    compile_cache: Path
    adapter: Path | None = None  # that training continues
    teacher: Path | None = None  # that it learns from
    memory: Path | None = None  # on each node one of its own, for memory checkpoints; None: there are none


@dataclass(frozen=True)
class TrainingProgress:
    """How far a run has trained, over all its attempts: what a checkpoint records besides tensors."""

    step: int = 0
    seconds: float = 0.0  # spent in the training loop up to this step
    first_loss: float | None = None
    last_loss: float | None = None
    smoothed_loss: float | None = None  # an exponential mean of the losses so far, `sanity.smoothed`
    first_steps_seconds: float = 0.0  # of `seconds`: the first step of each attempt, which warms up
    resumed_from: tuple[int, ...] = field(default=())
    # mean losses over the label tokens of the validation rows
    base_validation_loss: float | None = None  # before the first step
    validation_loss: float | None = None  # the newest
    best_validation_loss: float | None = None
    best_step: int | None = None
    validations_since_best: int = 0
    stopped_early: bool = False
    # the objective's other metrics, by their names in metrics.jsonl: of the last step, and the newest validation's
    metrics: Mapping[str, float] = field(default_factory=dict)
    # of a mixture's experts
    first_expert_load: Loads = field(default_factory=dict)
    last_expert_load: Loads = field(default_factory=dict)
    tokens: int | None = None  # so far, of prompts and sampled answers, or rows with images; None: max_length a row
    peak_operations: float = 0.0  # of the ranks at their peak in `seconds`, wherever they ran

    def validated(self, loss: float, patience: int | None, metrics: Mapping[str, float]) -> TrainingProgress:
        """The progress after a validation; `patience`: after how many in a row without a lower loss it stops.

        `metrics`: what was measured besides the loss.
        """
        lower = self.best_validation_loss is None or loss < self.best_validation_loss
        best = lower and not math.isnan(loss)
        since = 0 if best else self.validations_since_best + 1
        return replace(
            self,
            validation_loss=loss,
            best_validation_loss=loss if best else self.best_validation_loss,
            best_step=self.step if best else self.best_step,
            validations_since_best=since,
            stopped_early=patience is not None and since >= patience,
            metrics={**self.metrics, **metrics},
        )


@dataclass(frozen=True)
class TrainingResult:
    """The result of a finished training: the final sharded checkpoint, and facts for the stage's record."""

    checkpoint: Path
    facts: dict[str, Any]


class Engine(Protocol):
    """The functions of every engine's module."""

    def train(self, task: TrainingTask, ranks: Ranks) -> TrainingResult:
        """Train to the last step on all `ranks`, from the newest complete checkpoint if there is one.

        Called on every rank. Raises UserError for what a user can correct, `ranks.Interrupted` after a signal.
        """

    def precompile(self, task: TrainingTask, ranks: Ranks) -> dict[str, Any]:
        """Run what training runs, in a few steps whose results are discarded, so that it is compiled.

        Called on every rank where the engine's rules have stage precompile. Returns facts for the stage's record.
        """
