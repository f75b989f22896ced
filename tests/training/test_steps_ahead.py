"""An accelerator computes a step while the outcome of the one before is read; here a CPU does as if it could."""

import itertools
import json
import os
import signal
from typing import Any

import pytest

from hyperpod_ft.engines.ranks import Interrupted
from hyperpod_ft.engines.torch import devices
from hyperpod_ft.engines.torch.loop import TrainingLoop
from hyperpod_ft.engines.torch.steps import LaunchedStep
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.run import Run
from tests.training.conftest import MakeRun, curve, metrics, train_here, write_rows

pytestmark = pytest.mark.training

SETTINGS = {
    "training.max_steps": 9,
    "training.save_every_steps": 4,
    "training.validate_every_steps": 3,
    "training.keep_best": True,
    "training.max_grad_norm": 0.2,
}


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`launch 1`, `read 1`, ... as they happen, with one step launched ahead."""
    found: list[str] = []
    launch, read = TrainingLoop.launch, LaunchedStep.read
    monkeypatch.setattr(devices, "is_asynchronous", lambda _: True)

    def launched(self: TrainingLoop, number: int, signals: list[int]) -> LaunchedStep:
        found.append(f"launch {number}")
        return launch(self, number, signals)

    def outcome(self: LaunchedStep, names: tuple[str, ...]) -> Any:
        found.append(f"read {self.number}")
        return read(self, names)

    monkeypatch.setattr(TrainingLoop, "launch", launched)
    monkeypatch.setattr(LaunchedStep, "read", outcome)
    return found


def files(run: Run, step: int) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.paths.checkpoint(step).iterdir() if path.suffix == ".distcp"}


def test_the_same_training(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Every number and every checkpoint; and no step begins before the one before it is saved or validated."""
    one, other = (make_run(name, SETTINGS) for name in ("one", "other"))
    for run in (one, other):
        write_rows(run.paths.dataset_path / "validation", 4, 32)
    train_here(one)
    order = request.getfixturevalue("order")
    train_here(other)
    assert curve(other) == curve(one)
    found, expected = ([row.get("validation_loss") for row in metrics(run)] for run in (other, one))
    assert found == expected
    for step in (8, 9):
        assert files(other, step) == files(one, step)
    ahead = [after for before, after in itertools.pairwise(order) if "launch" in before and "launch" in after]
    assert ahead == ["launch 2", "launch 6", "launch 8"], "3, 6 and 9 are validated; 4 and 8 are saved"


def test_a_signal_stops_after_the_step_that_was_launched(
    make_run: MakeRun, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("stopped", {"training.max_steps": 9})
    forward_backward = TrainingLoop.forward_backward

    def interrupted(self: TrainingLoop, number: int) -> Any:
        if number == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return forward_backward(self, number)

    monkeypatch.setattr(TrainingLoop, "forward_backward", interrupted)
    with pytest.raises(Interrupted) as stopped:
        train_here(run)
    assert stopped.value.step == 4 and stopped.value.saved
    assert json.loads((run.paths.checkpoint(4) / "checkpoint.json").read_text())
    monkeypatch.undo()
    train_here(run)
    whole = make_run("whole", {"training.max_steps": 9})
    train_here(whole)
    assert curve(run) == curve(whole)


def test_nothing_is_saved_after_a_step_without_a_finite_loss(
    make_run: MakeRun, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("broken", {"training.max_steps": 9})
    forward_backward = TrainingLoop.forward_backward

    def broken(self: TrainingLoop, number: int) -> Any:
        means, norm = forward_backward(self, number)
        return (means, norm * float("nan")) if number == 3 else (means, norm)

    monkeypatch.setattr(TrainingLoop, "forward_backward", broken)
    with pytest.raises(UserError, match=r"step 3: .*gradient norm nan.*nothing was saved"):
        train_here(run)
    assert order[-1] == "read 3" and "launch 4" in order
    assert not run.paths.checkpoints.exists() or not list(run.paths.checkpoints.iterdir())
