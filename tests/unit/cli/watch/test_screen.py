"""What the view shows on terminals of any size."""

from dataclasses import replace

import pytest

from hyperpod_ft.cli.watch.keys import View
from hyperpod_ft.cli.watch.screen import draw
from hyperpod_ft.cli.watch.watcher import Picture
from hyperpod_ft.launch.status import LatestMetrics, RunStatus, StageStatus
from hyperpod_ft.runs.results.log_text import parse_progress

CHAIN = View()
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
PICTURE = Picture(
    RunStatus("dolly", "/fsx/runs/dolly/1", "", "running", STAGES, submitted="2026-01-01T00:00:00Z",
              training=LatestMetrics(30, 120, 2.0, 1000.0)),
    losses=(4.0, 3.0, 2.0),
    newest={"tokens_per_second": 1234.5, "mfu": 0.31, "learning_rate": 1e-4, "grad_norm": 0.5},
    validation=(20, 2.5),
    seconds_per_step=1.5,
    stage="train",
    log=tuple(f"step {step}/120" for step in range(100)),
    log_path="/fsx/runs/dolly/1/logs/train.out",
    messages=("12:00:00  created training job dolly-train",),
)  # fmt: skip


def lines(picture: Picture = PICTURE, view: View = CHAIN, width: int = 120, height: int = 40) -> list[str]:
    drawn = draw(picture, view, NOW, width, height).split("\n", allow_blank=True)
    assert len(drawn) == height and all(line.cell_len <= width for line in drawn)
    return [line.plain.rstrip() for line in drawn]


def test_the_whole_chain_at_a_look() -> None:
    seen = lines()
    assert seen[0] == "dolly  running  1 of 4 stages done  submitted 1h02m ago"
    stages = "\n".join(seen[3:7])
    assert "env          done      ━━━━━━━━━━━━━━━━━━━━━━━━ 100%  5.1 s" in stages
    assert "━━━━━━──────────────────  25%  download model: 1.0 GB of 4.0 GB (25%), 100.0 MB/s  eta 30s" in stages
    assert "› train        running   ━━━━━━──────────────────  25%  step 30/120  eta 2m15s  0:12 node-[1-2]" in stages
    assert "merge        pending   ────────────────────────       Dependency" in stages
    assert "  train: restart 1 of 3 (rank 3: exit 1 at step 12)" in seen
    assert "  12:00:00  created training job dolly-train" in seen
    assert "  loss  █▅▁  4.0000 → 2.0000" in seen
    assert "1,234 tokens/s  MFU 31.0%  learning rate 1.0e-04  gradient norm 0.50  validation 2.5000 at step 20" in str(
        seen
    )
    assert seen[-2] == "step 99/120" and "log of train: /fsx/runs/dolly/1/logs/train.out" in str(seen)
    assert "c cancel the run" in seen[-1] and "q leave" in seen[-1]


@pytest.mark.parametrize("width", [1, 9, 40, 70, 300])
@pytest.mark.parametrize("height", [1, 2, 5, 9, 12, 20])
def test_every_size_of_a_terminal(width: int, height: int) -> None:
    for view in (View(), View(whole_log=True, lines_back=3), View(asks=True)):
        assert lines(view=view, width=width, height=height)[-1]
    if height >= 5 and width >= 40:
        assert any("› train" in line for line in lines(width=width, height=height)), "the stage at work stays"


def test_a_log_alone() -> None:
    seen = lines(view=View(whole_log=True, lines_back=10), height=13)
    assert [line for line in seen if line.startswith("step")] == [f"step {step}/120" for step in range(80, 90)]
    assert "10 newer lines below" in seen[1]


def test_what_a_log_holds_cannot_control_the_terminal() -> None:
    hostile = replace(PICTURE, log=("\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x1b[2J", "[bold]not markup[/bold]"))
    text = "\n".join(lines(hostile))
    assert "\x1b" not in text and "\x07" not in text
    assert "red\n?]0;title?\n?[2J\n[bold]not markup[/bold]" in text


def test_it_asks_before_it_cancels() -> None:
    assert lines(view=View(asks=True))[-1] == "Cancel the jobs of dolly? y yes, any other key no"
    assert lines(replace(PICTURE, cancelling=True))[-1] == "Cancelling…"
