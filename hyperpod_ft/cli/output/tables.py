"""How the commands print: tables, paths as a person types them, JSON, lines of progress."""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hyperpod_ft.terminal import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


def table(*columns: str) -> "Table":
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]], styles: Mapping[str, str]) -> "Text":
    """A table of plain words, whose second column has a style for each word: for hundreds of rows.

    A table of rich's, which can fold cells, takes 0.3 ms a row.
    """
    from rich.text import Text

    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    text = Text()
    text.append("  ".join(word.ljust(width) for word, width in zip(head, widths, strict=True)).rstrip(), "dim")
    for first, second, *others in rows:
        rest = (word.ljust(width) for word, width in zip(others, widths[2:], strict=True))
        text.append(f"\n{first.ljust(widths[0])}  ")
        text.append(second.ljust(widths[1]), styles.get(second))
        text.append(f"  {'  '.join(rest)}".rstrip())
    return text


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
