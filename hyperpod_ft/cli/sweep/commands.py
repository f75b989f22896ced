"""`hyperpod-ft sweep`: each command parses its arguments, calls one function and prints what that returns."""

from pathlib import Path
from typing import Annotated

import typer

from hyperpod_ft.cli.options import Json, command_group
from hyperpod_ft.cli.output.tables import print_json

app = typer.Typer(name="sweep", cls=command_group("submit"), no_args_is_help=True)

SweepFileArgument = Annotated[Path, typer.Argument(metavar="SWEEP_FILE", help="A sweep file (docs/stages.md).")]
Reference = Annotated[
    str | None,
    typer.Argument(metavar="SWEEP", help="A sweep file, or a sweep's directory. Default: the one submitted last."),
]


@app.command()
def plan(sweep_file: SweepFileArgument, as_json: Json = False) -> None:
    """Show the points of a sweep, and which stages of each would run."""
    from hyperpod_ft.cli.sweep import show
    from hyperpod_ft.download.assets import look_up
    from hyperpod_ft.sweep.planning import plan_sweep

    planned = plan_sweep(sweep_file, "slurm")
    look_up(planned.runs)
    if as_json:
        print_json(show.plan_values(planned))
    else:
        show.plan(planned)


@app.command()
def submit(
    sweep_file: SweepFileArgument,
    launcher: Annotated[
        str, typer.Option("--launcher", help="`slurm`, or `process`: plain processes on this machine.")
    ] = "slurm",
) -> None:
    """Submit a run for each point, once all are valid. What they share runs once.

    Safe to run again: points that are done or at work are left alone, the rest of a failed or interrupted one is
    submitted.
    """
    from hyperpod_ft.cli.sweep import show
    from hyperpod_ft.download import assets
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.runs.references import set_last
    from hyperpod_ft.sweep.planning import plan_sweep
    from hyperpod_ft.sweep.submission import submit_sweep

    planned = plan_sweep(sweep_file, launcher)
    assets.look_up(planned.runs)
    assets.refuse_changes(planned.runs)
    set_last("sweep", planned.sweep.directory)
    show.submitted(planned.sweep, submit_sweep(planned, Launchers()))


@app.command()
def resume(sweep: Reference = None) -> None:
    """Submit the rest of a sweep: points that failed, were cancelled, or were never submitted."""
    from hyperpod_ft.cli.sweep import show
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.sweep.planning import find_sweep
    from hyperpod_ft.sweep.submission import resume_sweep

    found = find_sweep(sweep)
    show.submitted(found, resume_sweep(found, Launchers()))


@app.command()
def status(sweep: Reference = None, as_json: Json = False) -> None:
    """Show the points of a sweep: settings, state, losses, and the best one; exit code 1 when one has failed."""
    from hyperpod_ft.cli.sweep import show
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.sweep.planning import find_sweep
    from hyperpod_ft.sweep.results import sweep_result

    result = sweep_result(find_sweep(sweep), Launchers())
    if as_json:
        print_json(result.as_dict())
    else:
        show.status(result)
    raise typer.Exit(1 if result.failed else 0)


@app.command()
def report(
    sweep: Reference = None,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Page to write.")] = Path(
        "sweep-report.html"
    ),
) -> None:
    """Write an HTML page that shows the runs of a sweep side by side."""
    from hyperpod_ft.cli.output.tables import shown
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.report.page import write_report
    from hyperpod_ft.sweep.planning import find_sweep
    from hyperpod_ft.sweep.results import sweep_reports

    write_report(sweep_reports(find_sweep(sweep), Launchers()), output)
    print(f"Wrote {shown(output)}")


@app.command()
def cancel(sweep: Reference = None) -> None:
    """Cancel the jobs of all points. `sweep resume` continues them later."""
    from hyperpod_ft.cli.sweep import show
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.sweep.planning import find_sweep
    from hyperpod_ft.sweep.submission import cancel_sweep

    show.cancelled(cancel_sweep(find_sweep(sweep), Launchers()))
