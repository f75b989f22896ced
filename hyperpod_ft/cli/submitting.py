"""Submitting a run's stages, and following them if that is wanted: what `submit`, `resume` and others end with."""

import typer

from hyperpod_ft import publish
from hyperpod_ft.cli.output import show_runs
from hyperpod_ft.cli.watch.following import follow_run
from hyperpod_ft.download import assets
from hyperpod_ft.launch import submit
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.runs import references
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import Selection


def submit_and_follow(
    run: Run,
    launchers: Launchers,
    launcher: str,
    selection: Selection,
    *,
    watch: bool,
    origin: str = "",
    moved: bool = False,
) -> None:
    """`origin`: the arguments of `submit`, if it was; `moved`: whether `resume` has given the run another place.

    With `watch`, the command fails unless its stages end well.

    Where there is nothing to do, another run stays the one that was submitted last.
    """
    if origin:  # `resume` continues with what was fetched
        launchers.bring_small_files(run, also=launcher)
        assets.refuse_changes([run])
    jobs = submit.submit(run, launchers, selection, launcher, assets.copy_local_sources)
    if origin:
        publish.write_text(run.paths.origin, origin)
    if jobs:
        references.set_last("run", run.paths.directory)
        if moved:
            show_runs.moved(run)
    show_runs.submitted(run, launchers, jobs, selection.only)
    if watch and not follow_run(run, launchers) and not all(run.journal.is_done(job.stage) for job in jobs):
        raise typer.Exit(1)
