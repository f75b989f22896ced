"""The commands that show runs while they work: `watch` on the terminal, `view` in a browser."""

from pathlib import Path
from typing import Annotated

import typer

from hyperpod_ft.cli.options import Overrides, RunReference

app = typer.Typer()


@app.command()
def watch(
    reference: RunReference = None,
    overrides: Overrides = None,
) -> None:
    """Follow a run until it ends; exit code 1 unless all is done.

    On a terminal it shows stages, the loss and logs, and keys choose a log, cancel the run or leave. Elsewhere it
    prints lines. Creates the run's next training job when it is due.
    """
    from hyperpod_ft.cli.watch.following import follow_run
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.runs import references

    run = references.find(reference, overrides or ())
    if not follow_run(run, Launchers.of(run)):
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
    """Serve the list of all runs below a root, and the report of each, to a browser.

    Pages are kept up to date while a run works. They are served until Ctrl-C, on this machine only, at a URL with a
    secret; nothing can be changed there.
    """
    from hyperpod_ft.runs import references
    from hyperpod_ft.runs.run_paths import runs_directory
    from hyperpod_ft.serving.view.server import ViewServer

    is_root = reference is not None and runs_directory(Path(reference)).is_dir()
    run = None if is_root else references.find(reference)
    root = run.root if run else Path(reference or "")
    with ViewServer(root.resolve(), port) as server:
        if run:
            print(f"{run.full_name}: {server.url}runs/{run.full_name}")
        print(f"All runs below {root}: {server.url}")
        forward = f"-L {server.port}:127.0.0.1:{server.port}"
        print(f"From another computer: hyperpod-ft cluster ssh CLUSTER_FILE {forward}, then open the same URL there")
        print("Stop: Ctrl-C", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
