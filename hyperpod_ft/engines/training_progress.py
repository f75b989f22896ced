"""How far a run has trained: what a checkpoint records besides tensors, and what decides when training stops."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class TrainingProgress:
    """How far a run has trained, over all its attempts."""

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

    def validated(self, loss: float, patience: int | None, metrics: Mapping[str, float]) -> "TrainingProgress":
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
