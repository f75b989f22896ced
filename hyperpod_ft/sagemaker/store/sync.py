"""What the client and the containers of training jobs see of a run: by one file system, or by a store in S3."""

import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from hyperpod_ft.aws.s3 import trees
from hyperpod_ft.aws.session import Session, explained
from hyperpod_ft.progress import format_bytes
from hyperpod_ft.runs.journal import Journal
from hyperpod_ft.runs.records import Output, Record, unix_time
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import RunPaths
from hyperpod_ft.sagemaker.section import store_of


class RunSync:
    """Transfers between the client and the containers. By itself for a file system that both mount: does nothing."""

    def prepare(self) -> None:
        """Push what the containers need of a run that is about to start."""

    def refresh(self) -> None:
        """Pull the small files of the run: records, jobs, metrics; and find out which outputs exist."""

    def has_run_files(self) -> bool:
        """Whether containers get the plan and the scripts that are here: another machine may have submitted later."""
        return True

    def push(self, files: Iterable[Path]) -> None:
        """Push these files, which this program has just written."""

    def discard(self, stages: Sequence[str]) -> None:
        """Remove the records of these stages, so that they run again."""


def sync_of(run: Run, session: Session) -> RunSync:
    store = store_of(run.config)
    if store is None:
        return RunSync()
    from hyperpod_ft.sagemaker.store.run_store import RunStore  # noqa: PLC0415 - imports numpy, which others need not

    with explained(f"store {store}"):
        return RunStore(run, session.client("s3"))


def pull_models(run: Run, directories: Collection[Path]) -> None:
    """Pull what the records list below these directories, unless it is already here.

    May be killed at any moment and called again: complete files stay. Does nothing for a run that is not in a store.
    Raises UserError when the store cannot be read, or lacks a file.
    """
    section, store = run.config.sagemaker, store_of(run.config)
    if section is None or store is None or not run.paths.store_listing.exists():
        return
    if missing := _missing(run.journal, directories):
        size = format_bytes(sum(output.size for output in missing))
        print(f"pulling {len(missing)} files, {size}, from {store} to {run.paths.root}", file=sys.stderr, flush=True)
        with explained(f"store {store}"):
            client = Session(section.region).client("s3")
            trees.pull_named(client, store, run.paths.root, [output.path for output in missing], "pull model")


def _missing(journal: Journal, directories: Collection[Path]) -> list[Output]:
    """The recorded files below the directories that are not here; a file appears only when it is complete."""
    writers = ("download", "consolidate", "merge")  # of models and adapters
    records = [journal.record(stage) for stage in writers if stage in journal.plan]
    return [
        output
        for record in records
        if record is not None
        for output in record.outputs
        if any((journal.paths.root / output.path).is_relative_to(directory) for directory in directories)
        and not is_here(journal.paths, record, output)
    ]


def is_here(paths: RunPaths, record: Record, output: Output) -> bool:
    """Whether this machine has a recorded file, and not one that was pulled from a store before the stage ran again."""
    path = paths.root / output.path
    if not path.is_file() or path.stat().st_size != output.size:
        return False
    if not paths.store_listing.exists():
        return True  # the stage wrote it here
    return path.stat().st_mtime >= unix_time(record.started)
