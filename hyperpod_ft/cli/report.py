"""The command that writes the report of runs."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN ...]", help="Run directories, run files or recipes. Default: the run submitted last."
        ),
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the page.")] = Path("report.html"),
) -> None:
    """Write a page about a run, or about several side by side: one HTML file that opens without a network.

    Losses, speed, answers, timeline, cost, and how it was made. Every finished run has one in its directory.
    """
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.launch.status import status
    from hyperpod_ft.report.gather import gather
    from hyperpod_ft.report.page import write_report
    from hyperpod_ft.runs import references

    found = [references.find(run) for run in runs] if runs else [references.find(None)]
    write_report([gather(run, status(run, Launchers.of(run))) for run in found], output)
    print(output)
