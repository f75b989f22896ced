"""Output of the commands that check an account, or a cluster."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from hyperpod_ft.cli.output import tables
from hyperpod_ft.progress import count

if TYPE_CHECKING:  # --help and the other commands start without it
    from hyperpod_ft.aws.checks.account import ValidationResult
    from hyperpod_ft.doctor.check import Expectations
    from hyperpod_ft.findings import Finding


def validated(checked: "ValidationResult", as_json: bool) -> int:
    """Print the findings and the checks of a validation; returns the exit code."""
    if as_json:
        tables.print_json(asdict(checked))
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
        tables.print_json([{**asdict(row), "verdict": word} for row, word in zip(rows, words, strict=True)])
        return
    table = tables.table("check", "")
    for row in rows:
        table.add_row(row.name, tables.clip(described(row), 1000))
    tables.console().print(table)
    print(f"{words.count('ok')} ok, {words.count('differs')} differ, {words.count('cannot tell')} cannot tell")
