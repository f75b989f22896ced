"""Pull the models of a run from its store, before this machine serves them."""

import sys
from collections.abc import Collection
from pathlib import Path

from hyperpod_ft.aws.s3 import trees
from hyperpod_ft.aws.session import explained
from hyperpod_ft.launch.sagemaker.store.sync import sync_of
from hyperpod_ft.launch.sagemaker.training_jobs import TrainingJobs
from hyperpod_ft.progress import format_bytes
from hyperpod_ft.runs.records import Output, Record, unix_time
from hyperpod_ft.runs.run import Run


def refresh(run: Run) -> None:
    """Look whether training jobs have made the tuned model since the last look. Raises UserError."""
    section = run.config.sagemaker
    if section is not None and run.store_listing.exists() and run.why_not_done(run.plan.model_stage):
        sync_of(run, TrainingJobs(section.region).session).refresh()


def pull(run: Run, directories: Collection[Path]) -> None:
    """Pull what the records list below these directories, as far as this machine lacks it.

    May be killed at any moment and called again: complete files stay. Does nothing for a run that is not in a store.
    Raises UserError when the store cannot be read, or lacks a file.
    """
    section, store = run.config.sagemaker, run.config.store
    if section is None or store is None or not run.store_listing.exists():
        return
    session = TrainingJobs(section.region).session
    if missing := _missing(run, directories):
        size = format_bytes(sum(output.size for output in missing))
        print(f"pulling {len(missing)} files, {size}, from {store} to {run.root}", file=sys.stderr, flush=True)
        with explained(f"store {store}"):
            client = session.client("s3", connections=trees.CONNECTIONS)
            trees.pull_named(client, store, run.root, [output.path for output in missing], "pull model")


def _stages(run: Run) -> list[str]:
    """The stages that write models and adapters."""
    return [stage for stage in ("download", "consolidate", "merge") if stage in run.plan]


def _missing(run: Run, directories: Collection[Path]) -> list[Output]:
    """The recorded files below the directories that are not here; a file appears only when it is complete."""
    records = map(run.record, _stages(run))
    return [
        output
        for record in records
        if record is not None
        for output in record.outputs
        if any((run.root / output.path).is_relative_to(directory) for directory in directories)
        and not is_here(run, record, output)
    ]


def is_here(run: Run, record: Record, output: Output) -> bool:
    """Whether this machine has a recorded file, and not one that was pulled from a store before the stage ran again."""
    path = run.root / output.path
    if not path.is_file() or path.stat().st_size != output.size:
        return False
    if not run.store_listing.exists():
        return True  # the stage wrote it here
    return path.stat().st_mtime >= unix_time(record.started)
