"""What `submit`, `resume` and `eval` have in common: submit, remember the run, say what was submitted, follow it."""

import typer

from hyperpod_ft import publish
from hyperpod_ft.cli.output import show_runs
from hyperpod_ft.cli.watch.following import follow_run
from hyperpod_ft.launch import submit
from hyperpod_ft.launch.launchers import Launchers
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
