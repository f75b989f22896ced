"""A picture of a run on a terminal of any size."""

import math
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.layout import Layout
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from hyperpod_ft.cli.output.show_runs import STATE_STYLES
from hyperpod_ft.cli.output.tables import shown
from hyperpod_ft.errors import printable
from hyperpod_ft.launch.status import RunStatus, StageStatus
from hyperpod_ft.progress import format_duration
from hyperpod_ft.runs.records import unix_time
from hyperpod_ft.runs.results.metrics import GrowingRows

_PACE_ROWS = 50


class LossHistory:
    """Reads only what was added since the last look; from the beginning when the file was written anew."""

    def __init__(self, path: Path) -> None:
        self._rows = GrowingRows(path)
        self._forget()

    def _forget(self) -> None:
        self.values: list[float] = []  # one a row
        self.newest: deque[dict[str, Any]] = deque(maxlen=_PACE_ROWS)
        self.validation: tuple[int, float] | None = None  # the newest, with its step

    def read(self) -> None:
        """A file that is missing, or cannot be read now, leaves what is known."""
        try:
            added, replaced = self._rows.read()
        except OSError:
            return
        if replaced:
            self._forget()
        self.newest.extend(added)
        for row in added:
            self.values.append(math.nan if row.get("loss") is None else row["loss"])
            if row.get("validation_loss") is not None:
                self.validation = row["step"], row["validation_loss"]

    @property
    def seconds_per_step(self) -> float | None:
        """Over the newest rows: a single step may be much slower or faster; None before there are two."""
        timed = [(row["step"], row["seconds"]) for row in self.newest if row.get("seconds") is not None]
        if len(timed) < 2:
            return None
        (first, began), (last, ended) = timed[0], timed[-1]
        return (ended - began) / (last - first) if last > first and ended > began else None


_CURVE_CELLS = 50
_LEVELS = "▁▂▃▄▅▆▇█"
_LARGEST = 1e38  # more than 32 bits hold
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


@dataclass(frozen=True)
class Picture:
    """A run at one moment, and what the user wants to see of it."""

    status: RunStatus
    losses: LossHistory
    stage: str  # whose log it is
    log: Sequence[str] = ()  # its last lines
    log_path: str = ""
    messages: Sequence[str] = ()  # newest last
    whole_log: bool = False  # the log alone
    asks: bool = False  # whether to cancel


def draw(picture: Picture, now: str, height: int) -> RenderableType:
    """What fills a terminal of `height` lines. `now`: ISO 8601, UTC."""
    current, stages = picture.status, picture.status.stages
    lines: list[RenderableType] = [_title(current, now)]
    height -= 3  # the title, the heading of the log, the footer
    if not picture.whole_log:
        remarks = [f"  {stage.stage}: {stage.restarts}" for stage in stages if stage.restarts]
        remarks += [f"  {message}" for message in picture.messages]
        more = [*(_line(remark, "yellow") for remark in remarks), *_losses(picture.losses)]
        lines += [_line(shown(current.directory), "dim"), Text(), _stages(picture), *more]
        height -= 2 + len(stages) + len(more)
    heading = _line(f"log of {picture.stage}: {shown(picture.log_path) if picture.log_path else 'none yet'}", "dim")
    lines += [Rule(heading, style="dim", align="left"), *map(_line, picture.log[-max(height, 1) :])]
    footer = "↑↓ stage  enter whole log  c cancel the run  q leave, the run continues"
    if picture.asks:
        footer = f"Cancel the jobs of {current.name}? y yes, any other key no"
    page = Layout()
    page.split_column(Layout(Group(*lines)), Layout(Text(footer, "reverse"), size=1))
    return page


def _line(text: str, style: str = "") -> Text:
    """One line, whatever it holds and however narrow the terminal is."""
    return Text(printable(_COLOURS.sub("", text).expandtabs()), style, no_wrap=True, overflow="ellipsis")


def _title(current: RunStatus, now: str) -> Text:
    title = _line(f"{current.name}  ", "bold")
    title.append(current.state, STATE_STYLES.get(current.state, ""))
    done = sum(stage.state == "done" for stage in current.stages)
    title.append(f"  {done} of {len(current.stages)} stages done")
    if current.submitted:
        title.append(f"  submitted {format_duration(max(unix_time(now) - unix_time(current.submitted), 0))} ago", "dim")
    return title


def _stages(picture: Picture) -> Table:
    """A line for each stage; on a narrow terminal, bars and details get narrower."""
    stages = Table.grid(*(Column(width=cells) for cells in (1, 12, 9)), padding=(0, 1, 0, 0))
    stages.add_column(max_width=24)
    stages.add_column(width=4, justify="right")
    stages.add_column()
    for stage in picture.status.stages:
        style, fraction = STATE_STYLES.get(stage.state, ""), picture.status.fraction(stage)
        stages.add_row(
            Text("›" if stage.stage == picture.stage else ""),
            stage.stage,
            Text(stage.state, style),
            ProgressBar(1.0, fraction or 0.0, complete_style=style, finished_style=style),
            "" if fraction is None else f"{fraction:.0%}",
            _line("  ".join(filter(None, _details(picture, stage)))),
        )
    return stages


def _details(picture: Picture, stage: StageStatus) -> Iterable[str]:
    if stage.seconds is not None:
        yield f"{stage.seconds:.1f} s"
    left = stage.progress.seconds_left if stage.progress else None
    training = picture.status.training if stage.stage == "train" else None
    if training:
        yield f"step {training.step}" + (f"/{training.total_steps}" if training.total_steps else "")
        if stage.state == "running" and training.total_steps and picture.losses.seconds_per_step:
            left = (training.total_steps - training.step) * picture.losses.seconds_per_step
    elif stage.progress:
        yield stage.progress.text.removeprefix(f"{stage.stage}: ")
    if left is not None:
        yield f"eta {format_duration(max(left, 0))}"
    yield stage.detail


def _losses(losses: LossHistory) -> list[RenderableType]:
    if not losses.values:
        return []
    curve = _line("  loss  ").append(sparkline(losses.values, _CURVE_CELLS), "cyan")
    curve.append(f"  {losses.values[0]:.4f} → ").append(f"{losses.values[-1]:.4f}", "bold")
    row = losses.newest[-1]
    known = [
        f"{row['tokens_per_second']:,.0f} tokens/s" if row.get("tokens_per_second") else "",
        f"MFU {row['mfu']:.1%}" if row.get("mfu") is not None else "",
        f"learning rate {row['learning_rate']:.1e}" if row.get("learning_rate") is not None else "",
        f"gradient norm {row['grad_norm']:.2f}" if row.get("grad_norm") is not None else "",
        f"validation {losses.validation[1]:.4f} at step {losses.validation[0]}" if losses.validation else "",
    ]
    return [Text(), curve, _line("        " + "  ".join(filter(None, known)), "dim")]


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as a curve of at most `width` cells, from their lowest to their highest.

    A cell that stands for several values shows the highest, so that no spike disappears; × when one is not finite.
    """
    cells = min(width, len(values))
    parts = [values[number * len(values) // cells : (number + 1) * len(values) // cells] for number in range(cells)]
    highest = [max(part) if all(abs(value) < _LARGEST for value in part) else None for part in parts]
    known = [value for value in highest if value is not None]
    low = min(known, default=0.0)
    step = (max(known, default=0.0) - low or 1.0) / (len(_LEVELS) - 1)
    return "".join("×" if value is None else _LEVELS[round((value - low) / step)] for value in highest)
