"""What a SWEEP argument means: a sweep file, the directory of a sweep, or the sweep submitted last."""

import sys
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError
from hyperpod_ft.shipped import state_directory
from hyperpod_ft.sweep.planning import sweep_directory
from hyperpod_ft.sweep.sweep import Sweep


def find_sweep(reference: str | None) -> Sweep:
    """The sweep that an argument means. Raises UserError when it was not submitted."""
    if reference is None:
        return Sweep.open(_last())
    path = Path(reference)
    if path.is_dir():
        return Sweep.open(path)
    directory = sweep_directory(path)
    if not (directory / "sweep.json").exists():
        raise UserError(f"{reference}: this sweep was not submitted yet", f"hyperpod-ft sweep {reference}")
    return Sweep.open(directory)


def set_last_sweep(directory: Path) -> None:
    """Make it the sweep submitted last. Only prints a line when the account's state directory cannot be written."""
    try:
        publish.write_text(_pointer(), f"{directory}\n")
    except OSError as error:
        print(f"not remembered as the last sweep: {_pointer()}: {error.strerror}", file=sys.stderr)


def _last() -> Path:
    try:
        return Path(_pointer().read_text(encoding="utf-8").rstrip("\n"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError("no sweep was submitted yet", "give a sweep file or the directory of a sweep") from None


def _pointer() -> Path:
    return state_directory() / "last-sweep"
