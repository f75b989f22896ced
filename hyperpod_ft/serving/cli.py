"""The commands that serve: models to `serve` and `ask`, pages about runs to `view`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hyperpod_ft.cli.options import ModelReference, ModelReferences, only
from hyperpod_ft.errors import UserError

if TYPE_CHECKING:
    from hyperpod_ft.runs.run import Run
    from hyperpod_ft.serving.models import Models

app = typer.Typer()

Device = Annotated[str, typer.Option("--device", help="`cpu`, `cuda`, or `auto`: a GPU if there is one.")]


@app.command()
def serve(
    reference: ModelReference = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; one that other machines can reach needs an API key.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65535, help="Port; 0: a free one.", show_default="8000, or 0 with --on-node"),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="NAME=DIR", help="Also serve a PEFT adapter of the base model."),
    ] = None,
    base: Annotated[bool, typer.Option("--base/--no-base", help="Also serve a run's base model.")] = True,
    device: Device = "auto",
    python: Annotated[
        Path | None,
        typer.Option("--with", metavar="PYTHON", help="Serve with vLLM, as installed for this interpreter."),
    ] = None,
    vllm_args: Annotated[
        str, typer.Option("--vllm-args", metavar="ARGS", help="Further arguments for vLLM, as one string.")
    ] = "",
    on_node: Annotated[
        bool, typer.Option("--on-node", help="Serve a run in a Slurm job on a node of its cluster.")
    ] = False,
    time_limit: Annotated[
        str | None,
        typer.Option(
            "--time", metavar="LIMIT", help="Time limit of the job of --on-node.", show_default="cluster.cpu_time_limit"
        ),
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="Cancel the job of --on-node.")] = False,
) -> None:
    """Serve a run's tuned model and its base model with the OpenAI API and a chat page.

    Where the environment has HYPERPOD_FT_API_KEY, clients must send it as their API key.
    """
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.serving import models, vllm

    if stop:
        _stop(reference)
        return
    found = models.find(reference, Launchers(), adapter or (), base=base)
    more = ["--host", host, "--port", str((0 if on_node else 8000) if port is None else port), "--device", device]
    environment: dict[str, str] = {}
    if python:
        if not on_node:
            vllm.check(python)
        found, options, environment = vllm.vllm_setup(found, python, vllm_args, base=base, on_node=on_node)
        more += options
    if on_node:
        _on_node(found, more, environment, time_limit, with_vllm=python is not None)
    else:
        models.exec_server(found, more)


@app.command()
def ask(
    reference: ModelReferences = None,
    *,
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="The question.")],
    image: Annotated[
        list[Path] | None,
        typer.Option("--image", metavar="FILE", help="A picture before the question; repeatable."),
    ] = None,
    device: Device = "auto",
) -> None:
    """Print the tuned model's answer to one question, greedy."""
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.serving import models

    found = models.find(only(reference, "QUESTION"), Launchers(), base=False)
    images = [f"--image={path.absolute()}" for path in image or ()]
    models.exec_server(found, ["--device", device, f"--ask={question}", *images])


@app.command()
def view(
    reference: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|ROOT", help="A run, or a cluster.root with its runs. Default: the run submitted last."
        ),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0: a free one.")] = 8008,
) -> None:
    """Serve the list of all runs below a root, and the report of each, to a browser.

    Pages are kept up to date while a run works. They are served until Ctrl-C, on this machine only, at a URL with a
    secret; nothing can be changed there.
    """
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.runs import references
    from hyperpod_ft.runs.run_paths import runs_directory
    from hyperpod_ft.serving.view import ViewServer

    is_root = reference is not None and runs_directory(Path(reference)).is_dir()
    run = None if is_root else references.find(reference, looking=True)
    root = run.paths.root if run else Path(reference or "")
    with ViewServer(root.resolve(), port, Launchers) as server:
        if run:
            print(f"{run.paths.full_name}: {server.url}runs/{run.paths.full_name}")
        print(f"All runs below {root}: {server.url}")
        forward = f"-L {server.port}:127.0.0.1:{server.port}"
        print(f"From another computer: hyperpod-ft cluster ssh CLUSTER_FILE {forward}, then open the same URL there")
        print("Stop: Ctrl-C", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def _on_node(
    found: "Models", more: list[str], environment: dict[str, str], time_limit: str | None, *, with_vllm: bool
) -> None:
    from hyperpod_ft.launch.slurm.launcher import slurm_of
    from hyperpod_ft.serving import models, node_job

    run = _required(found.run)
    slurm = slurm_of(run)
    wanted = node_job.resources(run, time_limit, accelerators=with_vllm)
    job = node_job.start(run, slurm, wanted, models.options(found, more), environment)
    address = node_job.wait(run, slurm, job, lambda line: print(line, flush=True))
    for line in node_job.directions(run.paths, job, address):
        print(line)


def _stop(reference: str | None) -> None:
    from hyperpod_ft.launch.slurm.launcher import slurm_of
    from hyperpod_ft.runs import references
    from hyperpod_ft.serving import node_job

    run = references.find(reference)
    jobs = node_job.stop(run, slurm_of(run))
    for job in jobs:
        print(f"cancelled job {job.job_id}")
    if not jobs:
        print("nothing to stop: no job serves this run")


def _required(run: "Run | None") -> "Run":
    if run is None:
        raise UserError("--on-node: needs a run, because the run file names the cluster", "give a run")
    return run
