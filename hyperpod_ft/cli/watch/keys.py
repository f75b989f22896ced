"""What the user looks at, and what each key does."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Action = Literal["", "leave", "cancel"]


@dataclass(frozen=True)
class View:
    """`stage`: whose log is shown; empty: that of the stage that failed or is at work."""

    stage: str = ""
    whole_log: bool = False  # the log alone
    lines_back: int = 0  # from the newest line of the log
    asks: bool = False  # whether to cancel


def press(view: View, key: str, stages: Sequence[str], shown: str, page: int, log_lines: int) -> tuple[View, Action]:
    """The view after a key, and what to do.

    `shown`: the stage whose log is seen; `page`: how many of its `log_lines` lines fit a screen.
    """
    if view.asks:
        return replace(view, asks=False), "cancel" if key == "y" else ""
    if key == "q":
        return view, "leave"
    if key == "c":
        return replace(view, asks=True), ""
    if key in ("enter", "l"):
        return replace(view, whole_log=not view.whole_log, lines_back=0), ""
    if key == "escape":
        return View(), ""
    if view.whole_log and key in ("up", "down", "page up", "page down", "home", "end"):
        oldest = max(log_lines - page, 0)
        step = {"up": 1, "down": -1, "page up": page, "page down": -page, "home": oldest, "end": -oldest}[key]
        return replace(view, lines_back=min(max(view.lines_back + step, 0), oldest)), ""
    if key in ("up", "down", "left", "right") and shown in stages:
        place = stages.index(shown) + (1 if key in ("down", "right") else -1)
        return replace(view, stage=stages[min(max(place, 0), len(stages) - 1)], lines_back=0), ""
    return view, ""
