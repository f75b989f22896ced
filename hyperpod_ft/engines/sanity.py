"""Checks whether the loss shows that a run is broken, before anything is saved. Does not import torch."""

import math

from hyperpod_ft.config.sections.training import Training
from hyperpod_ft.engines.interface import TrainingProgress
from hyperpod_ft.errors import UserError

_NEWEST_SHARE = 0.25
_TURN_OFF = "training.sanity_steps: 0 turns this check off"


def smoothed(before: float | None, loss: float) -> float:
    """The exponential mean of the losses so far: one step's outlier moves it by a quarter."""
    return loss if before is None else before + _NEWEST_SHARE * (loss - before)


def check_finite(step: int, loss: float, grad_norm: float) -> None:
    """Raise UserError when the loss of a step or the norm of its gradients is not finite."""
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise UserError(
            f"step {step}: the loss is {loss} and the gradient norm {grad_norm}; nothing was saved",
            "lower training.learning_rate, or check the rows of this step",
        )


def check(training: Training, progress: TrainingProgress, steps: int, vocabulary: int | None) -> None:
    """Raise UserError when training cannot continue from the loss after step `progress.step` of `steps`.

    The first step's loss is the base model's own: adapters start at zero, and no parameter has moved. If it exceeds
    ln(vocabulary), the loss of a model that guesses, by more than `sanity_margin`, the base model itself is broken.
    From step `sanity_steps` on, or at the last one of a shorter run, the smoothed loss may exceed the base model's by
    at most that margin.
    """
    margin = training.sanity_margin
    base, now = progress.first_loss, progress.smoothed_loss
    if not training.sanity_steps or base is None or now is None:
        return
    if progress.step == 1 and vocabulary and base > math.log(vocabulary) + margin:
        raise UserError(
            f"step 1: the base model's loss is {base:.4f}, more than training.sanity_margin {margin:g} above"
            f" {math.log(vocabulary):.4f}, the loss of guessing among its {vocabulary} tokens",
            f"check that model.source and its tokenizer are those that the data was prepared for; {_TURN_OFF}",
        )
    if progress.step >= min(training.sanity_steps, steps) and now > base + margin:
        raise UserError(
            f"step {progress.step}: the smoothed loss is {now:.4f}, more than training.sanity_margin {margin:g} above"
            f" the base model's {base:.4f}; this step was not saved",
            f"lower training.learning_rate, or check the data; {_TURN_OFF}",
        )
