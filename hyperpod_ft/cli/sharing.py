"""The commands that show a run: on the terminal while it works, as a page, in trackers, on the Hub."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hyperpod_ft.cli.options import RunReference, RunReferences, only
from hyperpod_ft.errors import UserError

if TYPE_CHECKING:
    from hyperpod_ft.runs.run import Run
    from hyperpod_ft.upload.push import Upload

_TRACK_SECONDS = 600.0


def report(
    runs: RunReferences = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the page.")] = Path("report.html"),
) -> None:
    """Write a page about one or more runs: one HTML file that opens without a network.

    Losses, speed, answers, timeline, cost, and how it was made. Every finished run has one in its directory.
    """
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.launch.status import status
    from hyperpod_ft.report.gather import gather
    from hyperpod_ft.report.page import write_report
    from hyperpod_ft.runs import references

    found, launchers = references.find_all(runs), Launchers()
    write_report([gather(run, status(run, launchers)) for run in found], output)
    print(output)


def track(reference: RunReference = None) -> None:
    """Publish to the run's trackers what they do not have yet: metrics and final figures.

    For trackers that could not be reached, and for training jobs. Exit code 1 when one still lacks something.
    """
    from hyperpod_ft.environments.trackers import install_trackers
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.runs import references
    from hyperpod_ft.tracking.follower import Shutdown, follow

    run = references.find(reference)
    if not run.config.tracking.trackers:
        raise UserError("tracking.trackers: this run has none", "name some in its run file, and give that file as RUN")
    Launchers().bring_small_files(run)
    for problem in install_trackers(run).values():
        print(problem)
    shutdown = Shutdown()
    shutdown.begin(_TRACK_SECONDS)
    states = follow(run, shutdown)
    for tracker, state in states.items():
        print(f"{tracker}: published to step {state.step} {state.problem or state.where}")
    raise typer.Exit(1 if any(state.problem for state in states.values()) else 0)


def push(
    reference: RunReferences = None,
    *,
    repository: Annotated[str, typer.Argument(metavar="ORG/NAME", help="A model repository of the Hub.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="Push the LoRA adapter alone, not the model.")] = False,
    public: Annotated[
        bool, typer.Option("--public", help="Everyone may read the repository. Default: private.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the files and their sizes; upload nothing.")
    ] = False,
) -> None:
    """Put the tuned model or the adapter on the Hugging Face Hub with its card, in one commit.

    Safe to run again after an interruption: only what is missing is uploaded. The token is HF_TOKEN or that of `hf auth
    login`.
    """
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.progress import format_bytes
    from hyperpod_ft.runs import references

    run = references.find(only(reference, "ORG/NAME"))
    launchers = Launchers()
    launchers.bring_small_files(run)
    if adapter or not dry_run:
        launchers.bring_outputs(run, [run.paths.adapter if adapter else run.paths.tuned_model])
    upload = _upload(run, adapter)
    visibility = "public" if public else "private"
    print(f"{len(upload.files)} files, {format_bytes(upload.nbytes)}, for {repository} ({visibility} if it is new)")
    if dry_run:
        for name, size in upload.sizes.items():
            print(f"  {name}  {format_bytes(size)}")
        return
    from hyperpod_ft.upload.push import push as push_files

    print(push_files(upload, repository, f"{run.paths.full_name} by hyperpod-ft", public=public))


def _upload(run: "Run", adapter: bool) -> "Upload":
    from hyperpod_ft.stages.model_card import model_card
    from hyperpod_ft.upload import push

    if not adapter:
        return push.model_upload(run)
    record = run.journal.record(push.stage_of(run, adapter))
    return push.adapter_upload(run, model_card(run, str(record.facts["chat_template"]) if record else "", adapter=True))


def watch(
    reference: RunReference = None,
) -> None:
    """Follow a run until it ends; exit code 0 if all is done or after `q`, 130 after Ctrl-C, otherwise 1.

    On a terminal it shows stages, the loss and logs, and keys choose a log, cancel the run or leave. Elsewhere it
    prints lines. Creates the run's next training job when it is due.
    """
    from hyperpod_ft.cli.watch.following import follow_run
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.runs import references

    run = references.find(reference, looking=True)
    if not follow_run(run, Launchers()):
        raise typer.Exit(1)
