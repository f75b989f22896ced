"""When the loss says that a run is broken."""

import math

import pytest

from hyperpod_ft.config.sections.training import Training
from hyperpod_ft.engines import sanity
from hyperpod_ft.engines.interface import TrainingProgress
from hyperpod_ft.errors import UserError

VOCABULARY = 128
TRAINING = Training(sanity_steps=5, sanity_margin=2.0)


def after(losses: list[float]) -> TrainingProgress:
    smoothed = None
    for loss in losses:
        smoothed = sanity.smoothed(smoothed, loss)
    return TrainingProgress(len(losses), 1.0, losses[0], losses[-1], smoothed)


def test_a_loss_that_falls_is_fine() -> None:
    for steps in range(1, 20):
        sanity.check(TRAINING, after([4.0 - step / 10 for step in range(steps)]), 20, VOCABULARY)


def test_a_loss_that_stays_far_above_the_base_models_stops_the_run() -> None:
    diverged = [2.0] + [9.0] * 4
    with pytest.raises(UserError) as raised:
        sanity.check(TRAINING, after(diverged), 20, VOCABULARY)
    # 2 + 7 * (1 - 0.75**4)
    assert all(fact in str(raised.value) for fact in ("step 5", "6.7852", "training.sanity_margin 2", "2.0000"))
    assert "lower training.learning_rate" in str(raised.value)


def test_later_divergence_is_found_too_but_one_outlier_is_ignored() -> None:
    fine = [2.0] * 50
    sanity.check(TRAINING, after([*fine, 9.0]), 100, VOCABULARY)
    with pytest.raises(UserError, match="step 52"):
        sanity.check(TRAINING, after([*fine, 9.0, 9.0]), 100, VOCABULARY)


def test_not_before_its_step_but_at_the_last_one_of_a_short_run() -> None:
    progress = after([2.0, 20.0, 20.0])
    sanity.check(TRAINING, progress, 20, VOCABULARY)
    with pytest.raises(UserError, match="step 3"):
        sanity.check(TRAINING, progress, 3, VOCABULARY)


def test_a_base_model_that_is_worse_than_guessing() -> None:
    sanity.check(TRAINING, after([math.log(VOCABULARY) + 1.9]), 20, VOCABULARY)
    with pytest.raises(UserError, match=r"step 1: .*7\.0000, .*4\.8520"):
        sanity.check(TRAINING, after([7.0]), 20, VOCABULARY)
    # only then: a later step has its own reasons
    sanity.check(TRAINING, after([7.0, 7.0]), 20, VOCABULARY)
    sanity.check(TRAINING, after([7.0]), 20, None)


def test_it_can_be_turned_off() -> None:
    off = Training(sanity_steps=0)
    sanity.check(off, after([90.0]), 1, VOCABULARY)
    sanity.check(off, after([2.0] + [90.0] * 9), 10, VOCABULARY)


@pytest.mark.parametrize(("loss", "grad_norm"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, math.inf)])
def test_what_is_not_finite_stops_the_run(loss: float, grad_norm: float) -> None:
    sanity.check_finite(3, 2.0, 0.0)
    with pytest.raises(UserError, match=f"step 3: the loss is {loss} and the gradient norm {grad_norm}"):
        sanity.check_finite(3, loss, grad_norm)
