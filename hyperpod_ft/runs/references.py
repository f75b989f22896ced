"""What a RUN argument means: a run directory, `name/id`, a run file, a recipe, or the run submitted last.

Also remembers which run, and which sweep, that was.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from hyperpod_ft import publish
from hyperpod_ft.config import run_file
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import directory_of, runs_directory
from hyperpod_ft.shipped import state_directory


def find(reference: str | None, overrides: Sequence[str] = ()) -> Run:
    """The run that an argument means; None means the run submitted last on this account.

    `overrides` are those of --set, for a run file or recipe. Raises UserError when there is no such run.
    """
    if reference is None or Path(reference).is_dir():
        if overrides:
            raise UserError("--set: a run directory cannot be changed", "give the run file it was submitted with")
        return last_run() if reference is None else Run.open(Path(reference))
    if run_of_name := _named(reference):
        return run_of_name
    run = Run.of(run_file.load(run_file.find(reference), overrides))
    if not run.jobs():
        raise UserError(f"{reference}: this run has not been submitted", f"hyperpod-ft submit {reference}")
    return run


def set_last(kind: Literal["run", "sweep"], directory: Path) -> None:
    """Make it the run or sweep submitted last on this account.

    Only prints a line when the account's state directory cannot be written.
    """
    path = _last(kind)
    try:
        publish.write_text(path, f"{directory}\n")
    except OSError as error:
        print(f"not remembered as the last {kind}: {path}: {error.strerror}", file=sys.stderr)


def last_directory(kind: Literal["run", "sweep"]) -> Path:
    """The directory of the run or sweep submitted last, which may no longer exist. Raises UserError when none was."""
    try:
        return Path(_last(kind).read_text(encoding="utf-8").rstrip("\n"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"no {kind} was submitted yet", f"give a {kind} directory or a {kind} file") from None


def _last(kind: str) -> Path:
    return state_directory() / f"last-{kind}"


def last_run() -> Run:
    """Raises UserError when no run was submitted, or its directory no longer exists."""
    return Run.open(last_directory("run"))


def _named(reference: str) -> Run | None:
    """The run `name/id` below the root of the last run, as `submit` and `list` print it."""
    if len(Path(reference).parts) != 2 or Path(reference).exists():
        return None
    directory = directory_of(last_run().root, reference)
    return Run.open(directory) if directory.is_dir() else None


def all_runs(root: Path) -> list[Run]:
    """The runs below a root, newest first; names on stderr those that cannot be opened."""
    frozen = sorted(runs_directory(root).glob("*/*/run.yaml"), key=lambda path: path.stat().st_mtime, reverse=True)
    runs = []
    for path in frozen:
        try:
            runs.append(Run.open(path.parent))
        except UserError as error:
            print(f"skipped: {error}", file=sys.stderr)
    return runs
