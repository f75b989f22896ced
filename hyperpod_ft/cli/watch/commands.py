"""The commands that show runs while they work: `watch` on the terminal, `view` in a browser."""

from pathlib import Path
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


@app.command()
def view(
    reference: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN|ROOT]", help="A run, or a cluster.root with its runs. Default: the run submitted last."
        ),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free one.")] = 8008,
) -> None:
    """Show runs in a browser: the list of all below a root, and the report of each, kept up to date while it works.

    Serves them on this machine only, at a URL with a secret, until Ctrl-C. Nothing can be changed there.
    """
    from hyperpod_ft.runs import references
    from hyperpod_ft.serving.view.server import ViewServer

    root = Path(reference) if reference and (Path(reference) / "runs").is_dir() else None
    run = references.find(reference) if root is None else None
    with ViewServer((root or run.root).resolve(), port) as server:  # type: ignore[union-attr]
        if run:
            print(f"{run.full_name}: {server.url}runs/{run.full_name}")
        print(f"All runs below {root or run.root}: {server.url}")  # type: ignore[union-attr]
        forward = f"-L {server.port}:127.0.0.1:{server.port}"
        print(f"From another computer: hyperpod-ft cluster ssh CLUSTER_FILE {forward}, then open the same URL there")
        print("Stop: Ctrl-C", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
