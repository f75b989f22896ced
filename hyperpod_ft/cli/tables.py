"""How the commands print: tables, paths as a person types them, lines of progress."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hyperpod_ft.terminal import printable

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

    # in a pipe rich assumes 80 columns and would fold paths and ids that a script reads
    return Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def shown(path: Path | str) -> str:
    """A path as a person would type it from here; a URL as it is."""
    if "://" in str(path):
        return str(path)
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)


def clock() -> str:
    return time.strftime("%H:%M:%S")


def progress(line: str) -> None:
    """Print a line with the time to stderr: stdout belongs to the results."""
    print(f"{clock()}  {line}", file=sys.stderr, flush=True)


def clip(text: str, width: int = 90) -> str:
    """One line, of a width that fits a table."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= width else line[: width - 1] + "…"
