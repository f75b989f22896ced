"""Reading a metrics.jsonl while it grows."""

import json
import math
from pathlib import Path

import pytest

from hyperpod_ft import publish
from hyperpod_ft.cli.watch.screen import LossHistory


def row(step: int, loss: float, validation: float | None = None, **others: float) -> str:
    return json.dumps({"step": step, "loss": loss, "validation_loss": validation} | others) + "\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def losses(path: Path) -> LossHistory:
    return LossHistory(path)


def test_only_what_was_added_is_read(losses: LossHistory, path: Path) -> None:
    losses.read()
    assert losses.values == [] and not losses.newest
    path.write_text(row(1, 4.0, 5.0) + row(2, 3.0))
    losses.read()
    with path.open("a") as stream:
        stream.write("damaged\n" + row(3, math.nan) + row(4, 2.0)[:9])
    losses.read()
    assert losses.values[:2] == [4.0, 3.0] and math.isnan(losses.values[2]) and len(losses.values) == 3
    assert losses.validation == (1, 5.0)
    with path.open("a") as stream:
        stream.write(row(4, 2.0, 4.5)[9:])
    losses.read()
    assert losses.values[3:] == [2.0] and losses.newest[-1]["step"] == 4 and losses.validation == (4, 4.5)


def test_a_file_written_anew_is_read_anew(losses: LossHistory, path: Path) -> None:
    """As a training does that resumes from an earlier step."""
    path.write_text(row(1, 4.0) + row(2, 3.0, 3.5))
    losses.read()
    publish.write_text(path, row(1, 4.0) + row(2, 2.9) + row(3, 2.8))
    losses.read()
    assert losses.values == [4.0, 2.9, 2.8] and losses.validation is None
    path.unlink()
    losses.read()
    assert losses.values == [4.0, 2.9, 2.8]


def test_the_pace_is_that_of_the_newest_rows(losses: LossHistory, path: Path) -> None:
    """The first step compiles; one slow step among many does not change the time left much."""
    seconds = [100.0 + step for step in range(1, 100)]
    seconds[-1] += 5
    rows = [row(step, 1.0, seconds=at) for step, at in enumerate(seconds, 1)]
    path.write_text(rows[0])
    losses.read()
    assert losses.seconds_per_step is None
    path.write_text("".join(rows))
    losses.read()
    assert losses.seconds_per_step == pytest.approx(1 + 5 / 49)
