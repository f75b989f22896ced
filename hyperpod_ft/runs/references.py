"""The run that was submitted last on this account: what `status`, `logs`, `cancel` and `resume` mean by default."""

import os
import sys
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.run import Run


def _pointer() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "hyperpod-ft" / "last-run"


def remember(run: Run) -> None:
    """A convenience: when the account's state directory is not to be written, it only says so."""
    try:
        publish.write_text(_pointer(), f"{run.directory}\n")
    except OSError as error:
        print(f"not remembered as the last run: {_pointer()}: {error.strerror}", file=sys.stderr)


def last_run() -> Run:
    """Raises UserError when there is none, or it is gone."""
    try:
        directory = Path(_pointer().read_text(encoding="utf-8").rstrip("\n"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError("no run was submitted yet", "give a run directory or a run file") from None
    return Run.open(directory)
