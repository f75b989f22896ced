"""The run that was submitted last on this account: what `status`, `logs`, `cancel` and `resume` mean by default."""

import os
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError
from hyperpod_ft.run import Run


def _pointer() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "hyperpod-ft" / "last-run"


def remember(run: Run) -> None:
    publish.write_text(_pointer(), f"{run.directory}\n")


def last_run() -> Run:
    """Raises UserError when there is none, or it is gone."""
    try:
        directory = Path(_pointer().read_text(encoding="utf-8").rstrip("\n"))
    except FileNotFoundError:
        raise UserError("no run was submitted yet", "give a run directory or a run file") from None
    return Run.open(directory)
