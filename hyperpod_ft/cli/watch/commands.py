"""The command `watch`."""

from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def watch(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="A run directory, run file or recipe. Default: the run submitted last."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. training.epochs=1.")
    ] = None,
) -> None:
    """Follow a run until it ends: its stages, the loss, logs; exit code 1 unless all is done.

    On a terminal, keys choose a log, cancel the run and leave. Creates the run's next training job when it is due.
    """
    from hyperpod_ft.cli.watch.following import follow_run
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.runs import references

    found = references.find(run, overrides or ())
    if not follow_run(found, Launchers.of(found)):
        raise typer.Exit(1)
