"""What the view shows."""

import json
import math
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from hyperpod_ft.cli.watch.screen import LossHistory, Picture, draw, sparkline
from hyperpod_ft.launch.status import LatestMetrics, RunStatus, StageStatus
from hyperpod_ft.runs.results.log_text import parse_progress

NOW = "2026-01-01T01:02:03Z"
STAGES = (
    StageStatus("env", "done", seconds=5.1),
    StageStatus(
        "download",
        "running",
        "0:40 node-1",
        "1",
        progress=parse_progress("download model: 1.0 GB of 4.0 GB (25%), 100.0 MB/s"),
    ),
    StageStatus("train", "running", "0:12 node-[1-2]", "2", restarts="restart 1 of 3 (rank 3: exit 1 at step 12)"),
    StageStatus("merge", "pending", "Dependency", "3"),
)
LOG = [
    *(f"step {step}/120" for step in range(100)),
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "\x1b[2J",
    "[bold]x[/bold]",
]


def row(step: int, loss: float, validation: float | None = None, **others: float) -> str:
    return json.dumps({"step": step, "loss": loss, "validation_loss": validation} | others) + "\n"


@pytest.fixture
def picture(tmp_path: Path) -> Picture:
    losses = LossHistory(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").write_text(
        row(27, math.nan)
        + row(28, 4.0, seconds=1.5)
        + row(29, 3.0, 2.5, seconds=3.0)
        + row(30, 2.0, seconds=4.5, tokens_per_second=1234.5, mfu=0.31, learning_rate=1e-4, grad_norm=0.5)
    )
    losses.read()
    status = RunStatus("dolly", "/fsx/runs/dolly/1", "", "running", STAGES, submitted="2026-01-01T00:00:00Z",
                       training=LatestMetrics(30, 120, 2.0, 1000.0))  # fmt: skip
    return Picture(status, losses, "train", LOG, "/fsx/train.out", ["12:00:00  created training job dolly-train"])


def lines(picture: Picture, width: int = 130, height: int = 24) -> list[str]:
    console = Console(file=StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    with console.capture() as drawn:
        console.print(draw(picture, NOW, height))
    return [line.rstrip() for line in drawn.get().splitlines()]


def test_the_whole_chain_at_a_look(picture: Picture) -> None:
    seen = lines(picture)
    assert seen[0] == "dolly  running  1 of 4 stages done  submitted 1h02m ago"
    assert seen[3:9] == [
        "  env          done      ━━━━━━━━━━━━━━━━━━━━━━━━ 100% 5.1 s",
        "  download     running   ━━━━━━                    25% download model: 1.0 GB of 4.0 GB (25%), 100.0 MB/s"
        "  eta 30s  0:40 node-1",
        "› train        running   ━━━━━━                    25% step 30/120  eta 2m15s  0:12 node-[1-2]",
        "  merge        pending                                 Dependency",
        "  train: restart 1 of 3 (rank 3: exit 1 at step 12)",
        "  12:00:00  created training job dolly-train",
    ]
    assert "  loss  ×█▅▁  nan → 2.0000" in seen
    known = "1,234 tokens/s  MFU 31.0%  learning rate 1.0e-04  gradient norm 0.50  validation 2.5000 at step 29"
    assert f"        {known}" in seen
    assert "log of train: /fsx/train.out ──" in "\n".join(seen)
    assert len(seen) == 24 and "c cancel the run" in seen[-1] and "q leave" in seen[-1]


def test_the_newest_of_a_log_which_cannot_control_the_terminal(picture: Picture) -> None:
    """Above the last line of the screen, on terminals of all sizes."""
    newest = ["step 98/120", "step 99/120", "red", "?]0;title?", "?[2J", "[bold]x[/bold]"]
    assert lines(picture)[-7:-1] == lines(picture, height=30)[-7:-1] == newest
    alone = lines(replace(picture, whole_log=True), 14, 9)
    assert alone[2:8] == newest and alone[0] == "dolly  runnin…"


def test_a_curve_goes_from_the_lowest_to_the_highest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 20) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.5, 2.5], 20) == "▁▁"
    assert sparkline([], 20) == ""
    assert sparkline([1, math.nan, 3, math.inf, -1e308], 20) == "▁×█××"


def test_no_spike_disappears() -> None:
    values = [1.0] * 100_000
    values[70_003] = 9.0
    curve = sparkline(values, 50)
    assert len(curve) == 50 and curve.count("█") == 1 and curve[35] == "█"
    values[20_000] = math.nan
    assert sparkline(values, 50)[10] == "×"


def test_the_pace_is_that_of_the_newest_rows(tmp_path: Path) -> None:
    """The first step compiles; one slow step among many does not change the time left much."""
    path = tmp_path / "metrics.jsonl"
    losses = LossHistory(path)
    seconds = [100.0 + step for step in range(1, 100)]
    seconds[-1] += 5
    rows = [row(step, 1.0, seconds=at) for step, at in enumerate(seconds, 1)]
    path.write_text(rows[0])
    losses.read()
    assert losses.seconds_per_step is None
    path.write_text("".join(rows))
    losses.read()
    assert losses.seconds_per_step == pytest.approx(1 + 5 / 49)
