"""The commands on runs. Each parses its arguments, calls one function and prints what that returns.

What a command calls is imported in its body: `--help` and completion then import typer alone.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hyperpod_ft import __version__
from hyperpod_ft.annexes import annexes
from hyperpod_ft.cli.checkpoint import consolidate, merge, verify
from hyperpod_ft.cli.clean import clean
from hyperpod_ft.cli.data import app as data_app
from hyperpod_ft.cli.doctor import doctor
from hyperpod_ft.cli.evaluation import eval_command
from hyperpod_ft.cli.init import init
from hyperpod_ft.cli.options import Json, Overrides, Root, RunReference, RunReferences, Watch, command_group
from hyperpod_ft.cli.output.tables import print_json
from hyperpod_ft.cli.replay import replay
from hyperpod_ft.cli.sharing import push, report, track, watch
from hyperpod_ft.cli.sweep.commands import app as sweep_app
from hyperpod_ft.errors import EXIT_USER_ERROR, VOLUME_ERRORS, UserError, file_of, printable

if TYPE_CHECKING:
    from hyperpod_ft.runs.run import Run

app = typer.Typer(
    name="hyperpod-ft",
    help="Fine-tune language models as a chain of Slurm jobs: one run file in, a merged model out.",
    cls=command_group(
        headings={
            "A run": "init data plan submit watch status logs cancel resume render",
            "Results": "report view list compare eval replay track",
            "The tuned model": "ask serve verify deploy push",
            "Many runs": "sweep clean",
            "Checkpoints and models without a run": "consolidate merge",
            "Clusters": "doctor first-day local cluster sagemaker",
        }
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(sweep_app, name="sweep", help="A run file with many settings. `sweep FILE` submits a run for each.")
app.add_typer(data_app, name="data", help="The rows of a run file. `data show` shows what is trained of them.")
for _command in (init, clean, consolidate, doctor, merge, push, replay, report, track, verify, watch):
    app.command()(_command)
app.command(name="eval")(eval_command)
for _annex in annexes():
    for _commands in _annex.commands():
        app.add_typer(_commands.app, name=_commands.name, help=_commands.help)

_EXIT_INTERRUPTED = 130  # as shells report SIGINT

RunFile = Annotated[str, typer.Argument(metavar="RUN_FILE", help="A run file, or the name of a packaged recipe.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hyperpod-ft {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


@app.command()
def plan(run_file: RunFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Show a run's stages, which of them will run and why, its ranks and degrees, and steps per epoch."""
    from hyperpod_ft.cli.output import show_runs
    from hyperpod_ft.download.assets import look_up
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.launch.preflight import preview

    run = _load(run_file, overrides)
    planned = preview(run, Launchers())
    look_up([run])
    if as_json:
        print_json(planned.as_dict())
    else:
        show_runs.plan(planned)


@app.command(name="render")
def render_command(
    run_file: RunFile,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Where to write the scripts. Default: the run directory.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Write the run's sbatch scripts without submitting them. Those in the run directory are ready for sbatch."""
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.launch.render import write
    from hyperpod_ft.launch.submit import prepare

    run = _load(run_file, overrides)
    for script in prepare(run, Launchers()) if output is None else write(run, output):
        print(script)


@app.command()
def submit(
    run_file: RunFile,
    overrides: Overrides = None,
    start: Annotated[
        str | None, typer.Option("--from", metavar="STAGE", help="Only this stage and later ones.")
    ] = None,
    only: Annotated[str | None, typer.Option("--only", metavar="STAGE", help="Only this stage.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Run the selected stages again even if they are done.")
    ] = False,
    launcher: Annotated[
        str,
        typer.Option(
            "--launcher",
            help="`slurm`, `sagemaker` for training jobs, or `process`: plain processes on this machine.",
        ),
    ] = "slurm",
    watch: Watch = False,
) -> None:
    """Submit the stages that must run, as a chain of jobs. Stages that are done are skipped."""
    import shlex

    from hyperpod_ft.cli.submitting import submit_and_follow
    from hyperpod_ft.download.assets import look_up
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.runs.selection import Selection

    found = Path(run_file)
    origin = [str(found.resolve()) if found.is_file() else run_file, *(f"--set={text}" for text in overrides or ())]
    run, selection = _load(run_file, overrides), Selection(start, only, force)
    look_up([run])
    submit_and_follow(run, Launchers(), launcher, selection, watch=watch, origin=shlex.join(origin))


@app.command()
def resume(
    reference: RunReference = None,
    overrides: Overrides = None,
    launcher: Annotated[
        str | None, typer.Option("--launcher", help="`slurm`, `sagemaker` or `process`. Default: the one used last.")
    ] = None,
    watch: Watch = False,
) -> None:
    """Submit the rest of a run that failed, was cancelled or was interrupted. Training resumes from its checkpoint.

    With `--set cluster.nodes=3`, for example, it continues there: a step keeps its rows.
    """
    from hyperpod_ft.cli.submitting import submit_and_follow
    from hyperpod_ft.launch.elsewhere import elsewhere
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.runs import references
    from hyperpod_ft.runs.selection import Selection

    run = references.find(reference)
    if overrides:
        run = elsewhere(run, overrides)
    launcher = launcher or run.journal.last_launcher
    submit_and_follow(run, Launchers(), launcher, Selection(), watch=watch, moved=bool(overrides))


@app.command(name="status")
def status_command(reference: RunReference = None, as_json: Json = False) -> None:
    """Show the state of each stage of a run; exit code 1 when a stage has failed."""
    from hyperpod_ft.cli.output import show_runs
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.launch.status import status
    from hyperpod_ft.runs import references

    run = references.find(reference, looking=True)
    current = status(run, Launchers())
    if as_json:
        print_json(current.as_dict())
    else:
        show_runs.status(current)
    raise typer.Exit(1 if current.failed else 0)


@app.command()
def logs(
    reference: RunReference = None,
    stage: Annotated[
        str | None, typer.Argument(metavar="STAGE", help="A stage. Default: the one that failed, or is running.")
    ] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Keep printing until the stage ends.")] = False,
) -> None:
    """Print the log of a stage. `logs train` is that of the run submitted last."""
    from typing import get_args

    from hyperpod_ft.config.run_config import StageName
    from hyperpod_ft.launch.follow import log
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.runs import references

    if stage is None and reference in get_args(StageName):
        reference, stage = None, reference
    run = references.find(reference, looking=True)
    for text in log(run, Launchers(), stage, until_it_ends=follow):
        print(text, end="", flush=True)


@app.command()
def cancel(reference: RunReference = None) -> None:
    """Cancel the jobs of a run. `resume` continues it later."""
    from hyperpod_ft.cli.output import show_runs
    from hyperpod_ft.launch import submit
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.runs import references

    run = references.find(reference)
    for line in show_runs.cancelled_lines(submit.cancel(run, Launchers())):
        print(line)


@app.command(name="list")
def list_command(root: Root = None, as_json: Json = False) -> None:
    """List the runs below a root, newest first, with their losses and goodput."""
    from hyperpod_ft.cli.output import show_runs
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.launch.status import list_runs
    from hyperpod_ft.runs import references

    chosen = references.chosen_root(root)
    statuses = list_runs(chosen, Launchers())
    if as_json:
        print_json([current.as_dict() for current in statuses])
    else:
        show_runs.runs(chosen, statuses)


@app.command()
def compare(runs: RunReferences = None, as_json: Json = False) -> None:
    """Show trained runs side by side: which settings differ, then speed, hours, cost, losses, exact answers."""
    from dataclasses import asdict

    from hyperpod_ft.cli.output import show_runs
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.report.comparison import differences
    from hyperpod_ft.runs import references
    from hyperpod_ft.runs.results import training_summary

    opened, launchers = references.find_all(runs), Launchers()
    for run in opened:
        launchers.bring_small_files(run)  # a run of training jobs may have finished since
    compared = [training_summary.require(run) for run in opened]
    differing = differences([run.config.by_key() for run in opened])
    if as_json:
        print_json({"settings": dict(differing), "runs": [asdict(training) for training in compared]})
    else:
        show_runs.comparison(differing, compared)


def _load(run_file: str, overrides: list[str] | None) -> "Run":
    from hyperpod_ft.config import run_file as run_files
    from hyperpod_ft.runs.run import Run

    config = run_files.load(run_files.find(run_file), overrides or ())
    if config.parallelism.degrees == "auto":
        from hyperpod_ft.download.assets import ensure_model_config

        ensure_model_config(config)
    return Run.of(config)


def main() -> None:
    """Entry point: a user's error is one line on stderr and exit code 2; a bug keeps its traceback."""
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
        if not file_of(error) and error.errno not in VOLUME_ERRORS:
            raise
        where = file_of(error) or "standard output, or a file"
        print(f"error: {printable(where)}: {error.strerror}; free or repair the volume", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


def _flush_output() -> None:
    """Raises OSError when the output cannot be written, as on a full disk; a closed pipe is not an error."""
    import os

    try:
        sys.stdout.flush()
    except OSError as error:
        # the rest of the buffer would fail again when the process ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise
