"""A run with trackers, and a training that is nothing but its metrics.jsonl."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.runs.records import Record, utc_now
from hyperpod_ft.runs.run import Run
from tests.conftest import MakeRun


@pytest.fixture
def tracked(make_run: MakeRun) -> MakeRun:
    """Makes a frozen run with these trackers, which `python` publishes to."""

    def make(*trackers: str, python: str = sys.executable, **overrides: Any) -> Run:
        run = make_run(tracking={"trackers": list(trackers), "python": python, "project": "tests"}, **overrides)
        run.freeze()
        return run

    return make


def row(step: int) -> dict[str, Any]:
    """A row of metrics.jsonl, with a validation loss every fourth step."""
    validation = 3 / step if step % 4 == 0 else None
    return {"step": step, "loss": 2 / step, "learning_rate": 1e-4, "validation_loss": validation, "mfu": None}


def log(run: Run, steps: Iterable[int]) -> None:
    """Append the rows of these steps, as rank 0 does."""
    with run.paths.metrics_path.open("a") as stream:
        for step in steps:
            stream.write(json.dumps(row(step)) + "\n")


def finish(run: Run, **facts: Any) -> None:
    """Write the record of the training."""
    record = Record("train", run.plan["train"].fingerprint, {}, (), facts, utc_now(), 0.0, "test", "")
    record.write(run.paths.record_path("train"))


def losses(run: Run) -> list[tuple[int, float]]:
    """Steps and losses in the run's event files, in the order they were written."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    files: list[Path] = sorted((run.paths.tracking / "tensorboard").glob("events.*"))
    events = [Event.FromString(content) for file in files for content in RawEventFileLoader(str(file)).Load()]
    values = [(event.step, value) for event in events for value in event.summary.value]
    return [(step, value.simple_value) for step, value in values if value.tag == "loss"]
