"""What a RUN argument means: a run directory, `name/id`, the name of runs, a run file, or the run submitted last.

Also remembers which run, and which sweep, that was.
"""

import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from hyperpod_ft import publish
from hyperpod_ft.config import run_file
from hyperpod_ft.config.fields import shortened
from hyperpod_ft.errors import UserError, did_you_mean
from hyperpod_ft.runs.journal import Journal
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import directory_of, runs_directory
from hyperpod_ft.shipped import state_directory


def find(reference: str | None, *, looking: bool = False) -> Run:
    """The run that an argument means; None means the run submitted last on this account.

    A command that only looks at a run takes an edited run file for the run that was submitted from it last, and says so
    on stderr. Raises UserError when there is no such run.
    """
    if reference is None:
        return Run.open(last_directory("run"))
    path = Path(reference)
    if path.is_dir():
        return Run.open(path)
    return _of_file(path, looking) if path.is_file() else _named(reference, looking)


def find_all(references: Sequence[str] | None) -> list[Run]:
    """The runs that a command shows side by side, as `find` finds each; without any, the run submitted last."""
    return [find(reference, looking=True) for reference in references or ()] or [find(None)]


def _of_file(path: Path, looking: bool) -> Run:
    run = Run.of(run_file.load(path))
    if run.journal.jobs():
        return run
    words = f"{shlex.quote(str(path.resolve()))} "
    last = next(
        (other for other in all_runs(run.paths.root) if f"{other.journal.submitted_as} ".startswith(words)), None
    )
    problem = f"{path}: as it is now, it has not been submitted"
    if last is None:
        raise UserError(problem, f"hyperpod-ft submit {path}")
    problem += f"; its last run is {last.paths.full_name}"
    if not looking:
        raise UserError(problem, f"submit it, or give {last.paths.directory} instead")
    print(problem, file=sys.stderr)
    return last


def _named(reference: str, looking: bool) -> Run:
    """The run `name/id`, or the newest run `name`, below the root of the last run, as `submit` and `list` print it.

    To do more than look at it, the newest of this user's own: others may give their runs the same name.
    """
    try:
        root = last_root()
    except UserError as error:
        raise UserError(f"{shortened(reference)}: no such file, and {error.problem}", error.remedy) from None
    directory = directory_of(root, reference)
    if (directory / "run.yaml").is_file():
        return Run.open(directory)
    found = _runs_at(directory.glob("*/run.yaml"))
    for run in found:
        if looking or run.journal.is_own:
            return run
    if found:
        raise UserError(
            f"{shortened(reference)}: the runs of this name are other users'",
            f"give the directory if you mean that one: {found[0].paths.directory}",
        )
    names = [path.name for path in runs_directory(root).glob("*")]
    raise UserError(
        f"{shortened(reference)}: no such file, and no run below {root}{did_you_mean(reference, names)}",
        "`hyperpod-ft list` shows the runs",
    )


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


def last_root() -> Path:
    """The root of the run submitted last, which may no longer exist. Raises UserError when none was."""
    return last_directory("run").parents[2]


def chosen_root(given: Path | None) -> Path:
    """The given root, or that of the last submitted run. Raises UserError if it cannot be a root of runs."""
    root = given or last_root()
    if not root.is_dir():
        raise UserError(
            f"{root}: no such directory", "give a cluster.root; for one run: hyperpod-ft status RUN" if given else ""
        )
    for above in (root.resolve(), *root.resolve().parents):
        if above.name == "runs" and next(above.glob("*/*/run.yaml"), None):
            raise UserError(f"{root}: is in the runs of the root {above.parent}", f"give {above.parent}")
    return root


def all_runs(root: Path) -> list[Run]:
    """The runs below a root, newest first; names on stderr those that cannot be opened, or whose jobs are damaged."""
    return [run for run in _runs_at(runs_directory(root).glob("*/*/run.yaml")) if _has_readable_jobs(run.journal)]


def _has_readable_jobs(journal: Journal) -> bool:
    """Whoever may write one run directory must not end the list of all."""
    try:
        journal.jobs()
    except (UserError, OSError) as error:
        print(f"skipped: {error}", file=sys.stderr)
        return False
    return True


def _runs_at(frozen: Iterable[Path]) -> list[Run]:
    runs = []
    for path in sorted(frozen, key=lambda path: path.lstat().st_mtime, reverse=True):
        try:
            runs.append(Run.open(path.parent))
        except UserError as error:
            print(f"skipped: {error}", file=sys.stderr)
    return runs
