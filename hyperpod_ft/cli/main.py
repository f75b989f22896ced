"""The commands. Each parses, calls one function and prints; nothing here decides anything."""

import errno
import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hyperpod_ft import __version__, publish
from hyperpod_ft.cli import show_runs
from hyperpod_ft.cli.checkpoint import app as checkpoint_app
from hyperpod_ft.cli.cluster import app as cluster_app
from hyperpod_ft.cli.local import app as local_app
from hyperpod_ft.config import run_file as runfile
from hyperpod_ft.errors import EXIT_USER_ERROR, UserError
from hyperpod_ft.launch import submit as submission
from hyperpod_ft.launch.launcher import Launcher
from hyperpod_ft.launch.monitor import all_runs, latest_jobs, status
from hyperpod_ft.launch.process import Process
from hyperpod_ft.launch.render import Kit, render
from hyperpod_ft.launch.slurm import Slurm
from hyperpod_ft.localcluster import LocalCluster, default_directory
from hyperpod_ft.runs import figures
from hyperpod_ft.runs.references import last_run, remember
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import Selection
from hyperpod_ft.shipped import PACKAGE

app = typer.Typer(
    name="hyperpod-ft",
    help="Fine-tune language models as a chain of Slurm jobs: one run file in, a merged model out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(local_app, name="local", help="A real Slurm on this machine.")
app.add_typer(cluster_app, name="cluster", help="Create, validate, connect to, change and delete a HyperPod cluster.")
app.add_typer(checkpoint_app)

_EXIT_INTERRUPTED = 130  # what shells make of SIGINT

RunFile = Annotated[str, typer.Argument(metavar="RUN_FILE", help="A run file, or the name of a packaged recipe.")]
RunReference = Annotated[
    str | None,
    typer.Argument(metavar="[RUN]", help="A run directory, run file or recipe; the last submitted run when left out."),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. training.epochs=1.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hyperpod-ft {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="And exit.")
    ] = False,
) -> None: ...


@app.command()
def init(
    recipe: Annotated[str, typer.Argument(help="A packaged recipe.")] = "quickstart",
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write it.")] = Path("run.yaml"),
) -> None:
    """Write a recipe as a run file of your own, ready to edit."""
    if recipe not in runfile.recipes():
        raise UserError(f"no recipe {recipe!r}", f"recipes: {', '.join(runfile.recipes())}")
    try:
        with output.open("x", encoding="utf-8") as stream:
            stream.write(runfile.recipes()[recipe].read_text(encoding="utf-8"))
    except FileExistsError:
        raise UserError(f"{output} exists", "give another name with -o") from None
    except OSError as error:
        raise UserError(f"{output}: {error.strerror}", "give another name with -o") from error
    print(f"Wrote {output}. Edit it, then: hyperpod-ft plan {output}")


@app.command()
def plan(run_file: RunFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Show the stages of a run: which will be skipped and why, ranks and degrees, steps per epoch."""
    run = Run.of(runfile.load(runfile.find(run_file), overrides or ()))
    if as_json:
        print(json.dumps(show_runs.plan_as_dict(run), indent=2))
    else:
        show_runs.plan(run)


@app.command(name="render")
def render_command(
    run_file: RunFile,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the scripts here; the run directory when left out.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Write the run's sbatch scripts without submitting them. Into the run directory, they are ready for sbatch."""
    run = Run.of(runfile.load(runfile.find(run_file), overrides or ()))
    if output is None:
        scripts = submission.prepare(run, _slurm(run))
    else:
        output.mkdir(parents=True, exist_ok=True)
        scripts = []
        for stage, text in render(run, Kit(Path(sys.executable), PACKAGE.parent)).items():
            scripts.append(output / f"{stage}.sbatch")
            scripts[-1].write_text(text, encoding="utf-8")
    for script in scripts:
        print(script)


@app.command()
def submit(
    run_file: RunFile,
    overrides: Overrides = None,
    start: Annotated[
        str | None, typer.Option("--from", metavar="STAGE", help="Only this stage and later ones.")
    ] = None,
    only: Annotated[str | None, typer.Option("--only", metavar="STAGE", help="Only this stage.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Run the selected stages again though they are done.")] = False,
    launcher: Annotated[str, typer.Option("--launcher", help="`slurm`, or `process` where there is none.")] = "slurm",
    watch: Annotated[bool, typer.Option("--watch", help="Follow the run until it ends.")] = False,
) -> None:
    """Submit what has to run, as a chain of jobs. What is done already is skipped."""
    run = Run.of(runfile.load(runfile.find(run_file), overrides or ()))
    found = Path(run_file)
    origin = [str(found.resolve()) if found.is_file() else run_file, *(f"--set={text}" for text in overrides or ())]
    _submit(run, _launcher(launcher, run), Selection(start, only, force), watch, shlex.join(origin))


@app.command()
def resume(
    run: RunReference = None,
    overrides: Overrides = None,
    launcher: Annotated[
        str | None, typer.Option("--launcher", help="`slurm` or `process`; as before when left out.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the run until it ends.")] = False,
) -> None:
    """Submit what is left of a run that failed, was cancelled or was cut short. Training continues where it was."""
    opened = _open(run, overrides)
    before = next((job.launcher for job in reversed(opened.jobs())), "slurm")
    _submit(opened, _launcher(launcher or before, opened), Selection(), watch)


@app.command(name="status")
def status_command(run: RunReference = None, overrides: Overrides = None, as_json: Json = False) -> None:
    """Show what each stage of a run is doing; exit code 1 when a stage has failed."""
    opened = _open(run, overrides)
    current = status(opened, _slurm(opened))
    if as_json:
        print(json.dumps(current.as_dict(), indent=2))
    else:
        show_runs.status(current)
    raise typer.Exit(1 if current.failed else 0)


@app.command()
def logs(
    stage: Annotated[str | None, typer.Argument(help="A stage; the one that failed or works when left out.")] = None,
    run: Annotated[str | None, typer.Option("--run", "-r", help="A run directory, run file or recipe.")] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on printing until the stage ends.")] = False,
) -> None:
    """Print the log of a stage."""
    opened = _open(run, None)
    show_runs.log(opened, _slurm(opened), stage, follow)


@app.command()
def cancel(run: RunReference = None, overrides: Overrides = None) -> None:
    """Cancel the jobs of a run. `resume` goes on from where they were."""
    opened = _open(run, overrides)
    jobs = submission.cancel(opened, _slurm(opened))
    for job in jobs:
        print(f"cancelled {job.stage} (job {job.job_id})")
    if not jobs:
        print("nothing to cancel: no job of this run is active")


@app.command(name="list")
def list_command(
    root: Annotated[Path | None, typer.Option("--root", help="cluster.root; that of the last submitted run.")] = None,
    as_json: Json = False,
) -> None:
    """List the runs below a root, newest first."""
    chosen = root or last_run().root
    statuses = [status(run, _slurm(run)) for run in all_runs(chosen)]
    if as_json:
        print(json.dumps([current.as_dict() for current in statuses], indent=2))
    else:
        show_runs.runs(chosen, statuses)


@app.command()
def compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN", help="Run directories, run files or recipes; trained ones.")
    ],
    as_json: Json = False,
) -> None:
    """Show trainings side by side: speed, hours, cost, losses, exact answers."""
    compared = [figures.require(_open(run, None)) for run in runs]
    if as_json:
        print(json.dumps([asdict(of) for of in compared], indent=2))
    else:
        show_runs.comparison(compared)


def _submit(run: Run, launcher: Launcher, selection: Selection, watch: bool, origin: str = "") -> None:
    slurm = _slurm(run)
    jobs = submission.submit(run, launcher, slurm, selection)
    if origin:
        publish.write_text(run.origin, origin)
    remember(run)
    show_runs.submitted(run, jobs)
    if watch and not show_runs.watch(run, slurm):
        raise typer.Exit(1)


def _open(reference: str | None, overrides: list[str] | None) -> Run:
    if reference is None or Path(reference).is_dir():
        if overrides:
            raise UserError("--set: a run directory is frozen", "give the run file that it was submitted with")
        return last_run() if reference is None else Run.open(Path(reference))
    if found := _named(reference):
        return found
    run = Run.of(runfile.load(runfile.find(reference), overrides or ()))
    if not latest_jobs(run):
        raise UserError(f"{reference}: this run was not submitted yet", f"hyperpod-ft submit {reference}")
    return run


def _named(reference: str) -> Run | None:
    """The run `name/id` below the root of the last run, as `submit` and `list` print it."""
    if len(Path(reference).parts) != 2 or Path(reference).exists():
        return None
    directory = last_run().root / "runs" / reference
    return Run.open(directory) if directory.is_dir() else None


def _launcher(name: str, run: Run) -> Launcher:
    if name == "process":
        return Process()
    if name == "slurm":
        return _slurm(run)
    raise UserError(f"--launcher {name}: unknown", "known: slurm, process")


def _slurm(run: Run) -> Slurm:
    """The Slurm of a run: the one it was submitted to while that exists.

    Before, for instance type `local`, the local cluster when it is up and SLURM_CONF names no other.
    """
    for job in reversed(run.jobs()):
        if job.slurm_conf and not job.cluster_is_gone:
            return Slurm({"SLURM_CONF": job.slurm_conf})
    cluster = LocalCluster(default_directory())
    if run.config.cluster.instance_type == "local" and "SLURM_CONF" not in os.environ and cluster.conf.exists():
        return Slurm(cluster.environment())
    return Slurm()


def main() -> None:
    """Entry point: a user's error is a line on stderr and exit code 2; a bug keeps its traceback."""
    try:
        try:
            app()
        finally:
            _flush_output()
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    except KeyboardInterrupt:
        sys.exit(_EXIT_INTERRUPTED)
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        where = error.filename or "standard output, or a file"
        print(f"error: {where}: {error.strerror}; free or repair the volume", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


def _flush_output() -> None:
    """Raises OSError when what was printed cannot be written, as on a full disk; that nobody reads it is none."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # what is left in the buffer would fail once more at the end of the process
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise
