"""What a SWEEP argument means: a sweep file, the directory of a sweep, or the sweep submitted last."""

from pathlib import Path

from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.references import last_directory
from hyperpod_ft.sweep.planning import sweep_directory
from hyperpod_ft.sweep.sweep import Sweep


def find_sweep(reference: str | None) -> Sweep:
    """The sweep that an argument means. Raises UserError when it was not submitted."""
    if reference is None:
        return Sweep.open(last_directory("sweep"))
    path = Path(reference)
    if path.is_dir():
        return Sweep.open(path)
    directory = sweep_directory(path)
    if not (directory / "sweep.json").exists():
        raise UserError(f"{reference}: this sweep has not been submitted", f"hyperpod-ft sweep {reference}")
    return Sweep.open(directory)
