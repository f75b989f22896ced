"""Following a run until none of its jobs is active, in a view on a terminal, elsewhere in lines; and submitting it."""

import typer

from hyperpod_ft import publish
from hyperpod_ft.cli.output import show_runs
from hyperpod_ft.cli.output.tables import console, shown
from hyperpod_ft.cli.watch import lines, terminal
from hyperpod_ft.launch import submit
from hyperpod_ft.launch.follow import follow
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.status import RunStatus
from hyperpod_ft.runs import references
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import Selection


def submit_and_follow(run: Run, launcher: str, selection: Selection, *, watch: bool, origin: str = "") -> None:
    """`origin`: the arguments of `submit`, if it was. With `watch`, the command fails unless the run ends well."""
    launchers = Launchers.of(run)
    jobs = submit.submit(run, launchers, selection, launcher)
    if origin:
        publish.write_text(run.origin, origin)
    references.set_last("run", run.directory)
    show_runs.submitted(run, jobs)
    if watch and not follow_run(run, launchers):
        raise typer.Exit(1)


def follow_run(run: Run, launchers: Launchers) -> bool:
    """Follow a run until no job is active; returns whether all is done. Leaving ends the watching, not the run."""
    try:
        current = _on_terminal(run, launchers) if terminal.can_draw() else lines.follow_in_lines(follow(run, launchers))
    except KeyboardInterrupt:
        print()
        _left(run)
        raise SystemExit(130) from None
    if current is None:
        raise SystemExit(0)
    if current.state == "done":
        show_runs.results(run)
    show_runs.advice(current)
    return current.state == "done"


def _on_terminal(run: Run, launchers: Launchers) -> RunStatus | None:
    """The last status of a run that ended, which stays on the screen; None when the user left before."""
    from hyperpod_ft.cli.watch.session import watch

    current, ended = watch(run, launchers)
    if current:
        console().print(show_runs.status_table(current))
    if ended:
        return current
    _left(run)
    return None


def _left(run: Run) -> None:
    print(f"No longer watching. Stop the run: hyperpod-ft cancel {shown(run.directory)}")
