"""How the commands print: tables, paths as a person types them, JSON, lines of progress."""

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hyperpod_ft.errors import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def table(*columns: str) -> "Table":
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else _width_in_a_pipe())


def _width_in_a_pipe() -> int:
    """That of the terminal beside it, as of `| less`; without one, wide enough that no path or id folds in a script."""
    with contextlib.suppress(OSError):
        return os.get_terminal_size(sys.__stderr__.fileno() if sys.__stderr__ else -1).columns or 200
    return 200


def shown(path: Path | str) -> str:
    """A path as a person would type it from here; a URL as it is."""
    if "://" in str(path):
        return str(path)
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def clock() -> str:
    return time.strftime("%H:%M:%S")


def progress(line: str) -> None:
    """Print a line with the time to stderr: stdout belongs to the results."""
    print(f"{clock()}  {line}", file=sys.stderr, flush=True)


def clip(text: str, width: int = 90) -> str:
    """One line, of a width that fits a table."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= width else line[: width - 1] + "…"


def clip_start(text: str, width: int = 90) -> str:
    """As `clip`, but the end of the text.

    >>> clip_start("Add the numbers. 31 and 33", 10)
    '…31 and 33'
    """
    line = printable(" ".join(text.split()))
    return line if len(line) <= width else "…" + line[1 - width :]
