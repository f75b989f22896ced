"""Pull the models of a run from its store, before this machine serves them."""

import sys
from collections.abc import Collection
from pathlib import Path

from hyperpod_ft.aws.s3 import trees
from hyperpod_ft.aws.session import explained
from hyperpod_ft.launch.sagemaker.store.place import place_of
from hyperpod_ft.launch.sagemaker.training_jobs import TrainingJobs
from hyperpod_ft.progress import format_bytes
from hyperpod_ft.runs.records import Output
from hyperpod_ft.runs.run import Run


def pull(run: Run, directories: Collection[Path]) -> None:
    """Pull what the records list below these directories, as far as this machine lacks it.

    May be killed at any moment and called again: complete files stay. Does nothing for a run that is not in a store.
    Raises UserError when the store cannot be read, or lacks a file.
    """
    section = run.config.sagemaker
    if section is None or section.store is None or not run.store_listing.exists():
        return
    if all(map(run.record, _stages(run))) and not _missing(run, directories):
        return
    session = TrainingJobs(section.region).session
    place_of(run, session).refresh()  # the jobs may have ended since the last look
    if missing := _missing(run, directories):
        size = format_bytes(sum(output.size for output in missing))
        print(f"pulling {len(missing)} files, {size}, from {section.store} to {run.root}", file=sys.stderr, flush=True)
        with explained(f"store {section.store}"):
            client = session.client("s3", connections=trees.CONNECTIONS)
            trees.pull_named(client, section.store, run.root, [output.path for output in missing], "pull model")


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
        and not _is_there(run.root / output.path, output.size)
    ]


def _is_there(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size
