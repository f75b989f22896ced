"""A picture of a run as lines of a terminal of any size."""

import re
from collections.abc import Iterable

from rich.text import Text

from hyperpod_ft.cli.output.show_runs import STATE_STYLES
from hyperpod_ft.cli.output.tables import shown
from hyperpod_ft.cli.watch.charts import bar, sparkline
from hyperpod_ft.cli.watch.keys import View
from hyperpod_ft.cli.watch.watcher import Picture
from hyperpod_ft.launch.status import RunStatus, StageStatus
from hyperpod_ft.progress import format_duration
from hyperpod_ft.runs.records import unix_time
from hyperpod_ft.terminal import printable

FRAME_LINES = 3  # around the log when it is shown alone
_LEAST_LINES = 7  # besides the stages; on a lower terminal there is nothing else
_LEAST_LOG_LINES = 4  # with its heading; where fewer are left, the curve of the loss makes room
_BAR_CELLS, _WIDTH_WITH_BARS = 24, 70
_CURVE_CELLS = 60
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


def draw(picture: Picture, view: View, now: str, width: int, height: int) -> Text:
    """`height` lines of at most `width` cells. `now`: ISO 8601, UTC."""
    footer = _footer(view, picture)
    title = _title(picture.status, now)
    if view.whole_log:
        return _page([title], _log(picture, view, width, height - FRAME_LINES), footer, width, height)
    stages = [_stage(picture, stage, width) for stage in picture.status.stages]
    if len(stages) + _LEAST_LINES > height:
        names = [stage.stage for stage in picture.status.stages]
        return _page([title, *_around(stages, names.index(picture.stage), height - 2)], [], footer, width, height)
    top = [title, Text(shown(picture.status.directory), "dim"), Text(), *stages, *_remarks(picture)]
    losses = _losses(picture, width)
    if len(top) + len(losses) + _LEAST_LOG_LINES < height:
        top += losses
    return _page(top, _log(picture, view, width, height - len(top) - 2), footer, width, height)


def _page(top: list[Text], log: list[Text], footer: Text, width: int, height: int) -> Text:
    lines = [*top, *log][: max(height - 1, 0)]
    lines += [Text()] * (height - 1 - len(lines))
    lines.append(footer)
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True, overflow="crop").join(lines)


def _around(lines: list[Text], place: int, count: int) -> list[Text]:
    """`count` of the lines, with the one at `place` among them."""
    start = min(max(place - count // 2, 0), max(len(lines) - count, 0))
    return lines[start : start + max(count, 0)]


def _title(current: RunStatus, now: str) -> Text:
    title = Text(f"{current.name}  ", "bold")
    title.append(current.state, STATE_STYLES.get(current.state, ""))
    done = sum(stage.state == "done" for stage in current.stages)
    title.append(f"  {done} of {len(current.stages)} stages done")
    if current.submitted:
        title.append(f"  submitted {format_duration(max(unix_time(now) - unix_time(current.submitted), 0))} ago", "dim")
    return title


def _stage(picture: Picture, stage: StageStatus, width: int) -> Text:
    style = STATE_STYLES.get(stage.state, "")
    line = Text("› " if stage.stage == picture.stage else "  ", "bold")
    line.append(f"{stage.stage:<12} ").append(f"{stage.state:<10}", style)
    fraction = picture.status.fraction(stage)
    if width >= _WIDTH_WITH_BARS:
        line.append(bar(fraction or 0.0, _BAR_CELLS, style)).append(" ")
    line.append(f"{fraction:4.0%}  " if fraction is not None else "      ")
    return line.append("  ".join(filter(None, _details(picture, stage))))


def _details(picture: Picture, stage: StageStatus) -> Iterable[str]:
    if stage.seconds is not None:
        yield f"{stage.seconds:.1f} s"
    training = picture.status.training if stage.stage == "train" else None
    if training:
        yield f"step {training.step}" + (f"/{training.total_steps}" if training.total_steps else "")
        if stage.state == "running" and training.total_steps and picture.seconds_per_step:
            yield _eta((training.total_steps - training.step) * picture.seconds_per_step)
    elif stage.progress:
        yield printable(stage.progress.text.removeprefix(f"{stage.stage}: "))
        if stage.progress.seconds_left is not None:
            yield _eta(stage.progress.seconds_left)
    yield printable(stage.detail)


def _eta(seconds: float) -> str:
    return f"eta {format_duration(max(seconds, 0))}"


def _remarks(picture: Picture) -> list[Text]:
    """Restarts, and what happened while the view was open."""
    restarts = [
        Text(f"  {stage.stage}: {printable(stage.restarts)}", "yellow")
        for stage in picture.status.stages
        if stage.restarts
    ]
    messages = [Text(f"  {printable(message)}", "yellow") for message in picture.messages]
    return restarts + messages


def _losses(picture: Picture, width: int) -> list[Text]:
    if not picture.losses:
        return []
    curve = Text("  loss  ").append(sparkline(picture.losses, min(_CURVE_CELLS, max(width - 36, 1))), "cyan")
    curve.append(f"  {picture.losses[0]:.4f} → ").append(f"{picture.losses[-1]:.4f}", "bold")
    row = picture.newest
    known = [
        f"{row['tokens_per_second']:,.0f} tokens/s" if row.get("tokens_per_second") else "",
        f"MFU {row['mfu']:.1%}" if row.get("mfu") is not None else "",
        f"learning rate {row['learning_rate']:.1e}" if row.get("learning_rate") is not None else "",
        f"gradient norm {row['grad_norm']:.2f}" if row.get("grad_norm") is not None else "",
        f"validation {picture.validation[1]:.4f} at step {picture.validation[0]}" if picture.validation else "",
    ]
    return [Text(), curve, Text("        " + "  ".join(filter(None, known)), "dim")]


def _log(picture: Picture, view: View, width: int, lines: int) -> list[Text]:
    """The heading, and `lines` lines of the log, fewer if it has fewer."""
    where = f" {shown(picture.log_path)}" if picture.log_path else " none yet"
    end = len(picture.log) - view.lines_back
    newer = f"{view.lines_back} newer lines below, " if view.lines_back else ""
    heading = Text(f"── {newer}log of {picture.stage}:{where} ", "dim")
    heading.append("─" * max(width - heading.cell_len, 0), "dim")
    return [heading, *(Text(_plain(line)) for line in picture.log[max(end - max(lines, 0), 0) : end])]


def _plain(line: str) -> str:
    return printable(_COLOURS.sub("", line).expandtabs())


def _footer(view: View, picture: Picture) -> Text:
    if view.asks:
        return Text(f"Cancel the jobs of {picture.status.name}? y yes, any other key no", "bold reverse")
    if picture.cancelling:
        return Text("Cancelling…", "bold reverse")
    scroll = "↑↓ scroll  ←→ stage  enter back" if view.whole_log else "↑↓ stage  enter whole log"
    return Text(f"{scroll}  c cancel the run  q leave, the run continues", "reverse")
