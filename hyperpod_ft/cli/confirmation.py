"""Asking before something is deleted or changed."""

import sys

import typer

from hyperpod_ft.errors import UserError


def typed(name: str, confirm: str | None) -> str:
    """The name that the user typed, or gave with --confirm. Raises UserError without a terminal."""
    if confirm is not None:
        return confirm
    if not sys.stdin.isatty():
        raise UserError(f"cannot confirm the deletion of {name}: not a terminal", f"pass --confirm {name}")
    answer: str = typer.prompt("Type its name to continue")
    return answer


def require_yes(question: str) -> None:
    """Raises UserError without a terminal, and typer's Exit for a no."""
    if not sys.stdin.isatty():
        raise UserError(f"{question} Not a terminal", "pass --yes")
    if not typer.confirm(question):
        raise typer.Exit(1)
