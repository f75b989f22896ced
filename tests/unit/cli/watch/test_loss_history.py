"""Reading a metrics.jsonl while it grows."""

import json
import math
from pathlib import Path

import pytest

from hyperpod_ft import publish
from hyperpod_ft.cli.watch.loss_history import LossHistory


def row(step: int, loss: float, validation: float | None = None) -> str:
    return json.dumps({"step": step, "loss": loss, "validation_loss": validation}) + "\n"


@pytest.fixture
def losses(tmp_path: Path) -> LossHistory:
    return LossHistory(tmp_path / "metrics.jsonl")


def test_only_what_was_added_is_read(losses: LossHistory) -> None:
    losses.read()
    assert losses.values == [] and losses.newest == {}
    losses.path.write_text(row(1, 4.0, 5.0) + row(2, 3.0))
    losses.read()
    with losses.path.open("a") as stream:
        stream.write("damaged\n" + row(3, math.nan) + row(4, 2.0)[:9])
    losses.read()
    assert losses.values[:2] == [4.0, 3.0] and math.isnan(losses.values[2]) and len(losses.values) == 3
    assert losses.validation == (1, 5.0)
    with losses.path.open("a") as stream:
        stream.write(row(4, 2.0, 4.5)[9:])
    losses.read()
    assert losses.values[3:] == [2.0] and losses.newest["step"] == 4 and losses.validation == (4, 4.5)


def test_a_file_written_anew_is_read_anew(losses: LossHistory) -> None:
    """As a training does that resumes from an earlier step."""
    losses.path.write_text(row(1, 4.0) + row(2, 3.0, 3.5))
    losses.read()
    publish.write_text(losses.path, row(1, 4.0) + row(2, 2.9) + row(3, 2.8))
    losses.read()
    assert losses.values == [4.0, 2.9, 2.8] and losses.validation is None
    losses.path.unlink()
    losses.read()
    assert losses.values == [4.0, 2.9, 2.8]


def test_the_pace_is_that_of_the_newest_rows(losses: LossHistory) -> None:
    """The first step compiles; one slow step among many does not change the time left much."""
    seconds = [100.0 + step for step in range(1, 100)]
    seconds[-1] += 5
    rows = [json.dumps({"step": step, "loss": 1.0, "seconds": at}) for step, at in enumerate(seconds, 1)]
    losses.path.write_text(rows[0] + "\n")
    losses.read()
    assert losses.seconds_per_step is None
    losses.path.write_text("\n".join(rows) + "\n")
    losses.read()
    assert losses.seconds_per_step == pytest.approx(1 + 5 / 49)
