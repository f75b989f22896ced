"""The figures of a step that was computed again, beside the recorded ones, and how far they may differ."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyperpod_ft.config.instances import CATALOGUE
from hyperpod_ft.runs.results.usage import Usage
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages.stage import versions

if TYPE_CHECKING:
    from hyperpod_ft.engines.torch.replay import ReplayedStep

# Relative, for the loss, from steps of the quickstart on 4 ranks: they differed by at most 1.1e-7 in fp32, 2.2e-3 in
# bf16. Gradients and weights differ more (2e-7 and 9.9e-3; 3.8e-6 and 3.7e-2): AdamW amplifies small differences.
_FP32_ON_CPUS, _OTHERWISE = 1e-5, 1e-2
_SHARES = {"loss": 1, "gradient norm": 5, "weights": 10}
_RATE = 1e-9  # it is a function of the step


@dataclass(frozen=True)
class Bound:
    """How far a loss may differ, relative to the recorded one, and why; 0: not at all."""

    relative: float
    why: str


def bound_of(run: Run, device: str, ran: Sequence[Usage]) -> Bound:
    """That of a step of the run, which one process has computed on `device`.

    `ran`: the attempts of the steps that it has computed, the last one's last.
    """
    record, last = run.journal.record("train"), ran[-1]
    types = {attempt.instance_type for attempt in ran}
    if others := {CATALOGUE[name].device for name in types if name in CATALOGUE} - {device}:
        return Bound(_OTHERWISE, f"the run computed on {min(others)}")
    if device != "cpu":
        return Bound(_OTHERWISE, f"{device} does not always add in the same order")
    relative = _FP32_ON_CPUS if run.config.training.precision == "fp32" else _OTHERWISE
    if len({(attempt.degrees, attempt.ranks, attempt.micro_batch_size, attempt.host) for attempt in ran}) > 1:
        return Bound(relative, "the training has changed its place")
    if last.ranks > 1:
        return Bound(relative, f"{last.ranks} ranks have added in another order")
    if record is None or record.versions != versions():
        return Bound(relative, "the packages have other versions, or the training has no record of them yet")
    if last.host != platform.node():
        return Bound(relative, f"the run computed on {f'host {last.host}' if last.host else 'an unknown host'}")
    return Bound(0.0, "one rank, on this host, with the same packages")


def wrong_figures(found: "ReplayedStep", row: dict[str, Any], bound: Bound) -> list[str]:
    """Print each figure; the names of those that differ by more than they may."""
    wrong = []

    def compare(name: str, shown: str, difference: float, allowed: float) -> None:
        said = f"differs by {difference:.1e}, allowed {allowed:.0e}" if difference else "equal"
        print(f"{name:<14} {shown}: {said}")
        if difference > allowed:
            wrong.append(name)

    step = found.step
    for name, value, key in (("loss", step.loss, "loss"), ("gradient norm", step.grad_norm, "grad_norm")):
        compare(name, *_beside(value, row[key]), bound.relative * _SHARES[name])
    compare("learning rate", *_beside(step.learning_rate, row["learning_rate"]), _RATE)
    if found.weights is None:
        print("weights        not compared: no checkpoint was kept after this step")
    else:
        compare("weights", "those of the checkpoint after the step", found.weights, bound.relative * _SHARES["weights"])
    return wrong


def _beside(value: float, recorded: float) -> tuple[str, float]:
    difference = abs(value - recorded)
    return f"{value:.9g}, recorded {recorded:.9g}", difference / abs(recorded) if recorded else difference
