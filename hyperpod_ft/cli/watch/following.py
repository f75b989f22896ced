"""Following a run until none of its jobs is active, in a view on a terminal, elsewhere in lines; and submitting it."""

import typer

from hyperpod_ft import publish
from hyperpod_ft.cli.output import show_runs
from hyperpod_ft.cli.output.tables import console, shown
from hyperpod_ft.cli.watch import lines, session, terminal
from hyperpod_ft.launch import submit
from hyperpod_ft.launch.follow import follow
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.runs import references
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import RunPaths
from hyperpod_ft.runs.selection import Selection


def submit_and_follow(run: Run, launcher: str, selection: Selection, *, watch: bool, origin: str = "") -> None:
    """`origin`: the arguments of `submit`, if it was. With `watch`, the command fails unless the run ends well.

    Where there is nothing to do, another run stays the one that was submitted last.
    """
    from hyperpod_ft.download import assets

    launchers = Launchers.of(run)
    if origin:  # `resume` continues with what was fetched
        launchers.bring_files(run, also=launcher)
        assets.refuse_changes([run])
    jobs = submit.submit(run, launchers, selection, launcher, assets.bring)
    if origin:
        publish.write_text(run.paths.origin, origin)
    if jobs:
        references.set_last("run", run.paths.directory)
    show_runs.submitted(run, jobs, selection.only)
    if watch and not follow_run(run, launchers):
        raise typer.Exit(1)


def follow_run(run: Run, launchers: Launchers) -> bool:
    """Follow a run until no job is active; returns whether all is done. Leaving ends the watching, not the run."""
    try:
        if terminal.can_draw():
            current, ended = session.watch(run, launchers)
            console().print(show_runs.status_table(current))
        else:
            current, ended = lines.follow_in_lines(follow(run, launchers)), True
    except KeyboardInterrupt:
        print()
        _left(run.paths)
        raise SystemExit(130) from None
    if not ended:
        _left(run.paths)
        raise SystemExit(0)
    if current.state == "done":
        if run.paths.store_listing.exists():  # its stages ran elsewhere
            from hyperpod_ft.report.gather import gather
            from hyperpod_ft.report.page import write_report

            write_report([gather(run)], run.paths.report_path)
        show_runs.results(run)
    show_runs.advice(current)
    return current.state == "done"


def _left(paths: RunPaths) -> None:
    print(f"No longer watching. Stop the run: hyperpod-ft cancel {shown(paths.directory)}")
