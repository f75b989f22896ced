"""How the commands print: tables, paths as a person types them, JSON, lines of progress, and what checks found."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from hyperpod_ft.errors import printable
from hyperpod_ft.progress import count

if TYPE_CHECKING:  # --help and the other commands start without it
    from rich.console import Console
    from rich.table import Table

    from hyperpod_ft.aws.checks.account import ValidationResult
    from hyperpod_ft.doctor.check import Expectations
    from hyperpod_ft.findings import Finding


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


def validated(checked: "ValidationResult", as_json: bool) -> int:
    """Print the findings and the checks of a validation; returns the exit code."""
    if as_json:
        print_json(asdict(checked))
    else:
        for finding in checked.findings:
            print(finding)
        for skipped in checked.skipped:
            print(f"not checked: {skipped}")
        print(f"checked: {', '.join(checked.done)}")
        where = f"account {checked.account}" if checked.account else "offline"
        errors = sum(finding.verdict == "error" for finding in checked.findings)
        found = f"{_number(errors, 'error')}, {_number(len(checked.findings) - errors, 'warning')}"
        print(f"{found} ({len(checked.done)} checks, {where}, {checked.seconds:.1f} s)")
    return 1 if checked.has_errors else 0


def _number(number: int, noun: str) -> str:
    return count(number, noun) if number else f"no {noun}s"


def conclude(
    rows: "Sequence[Finding]", report: Path | None, as_json: bool, expected: "Expectations | None" = None
) -> NoReturn:
    """Write the report, print the rows, and end the command with its exit code."""
    from hyperpod_ft.doctor.head_node import text

    if report is not None:
        report.write_text(text(rows, expected), encoding="utf-8")
    _show(rows, as_json)
    raise typer.Exit(1 if any(row.verdict == "error" for row in rows) else 0)


def _show(rows: "Sequence[Finding]", as_json: bool) -> None:
    from hyperpod_ft.doctor.check import WORDS, described

    words = [WORDS[row.verdict] for row in rows]
    if as_json:
        print_json([{**asdict(row), "verdict": word} for row, word in zip(rows, words, strict=True)])
        return
    printed = table("check", "")
    for row in rows:
        printed.add_row(row.name, clip(described(row), 1000))
    console().print(printed)
    print(f"{words.count('ok')} ok, {words.count('differs')} differ, {words.count('cannot tell')} cannot tell")
