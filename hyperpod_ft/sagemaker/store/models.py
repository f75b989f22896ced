"""Pull the models of a run from its store, before this machine uses them."""

import sys
from collections.abc import Collection
from pathlib import Path

from hyperpod_ft.aws.s3 import trees
from hyperpod_ft.aws.session import explained
from hyperpod_ft.planning.plan import Plan
from hyperpod_ft.progress import format_bytes
from hyperpod_ft.runs.journal import Journal
from hyperpod_ft.runs.records import Output, Record, unix_time
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import RunPaths
from hyperpod_ft.sagemaker.section import section_of, store_of
from hyperpod_ft.sagemaker.training_jobs import TrainingJobs


def pull(run: Run, directories: Collection[Path]) -> None:
    """Pull what the records list below these directories, unless it is already here.

    May be killed at any moment and called again: complete files stay. Does nothing for a run that is not in a store.
    Raises UserError when the store cannot be read, or lacks a file.
    """
    section, store = section_of(run.config), store_of(run.config)
    if section is None or store is None or not run.paths.store_listing.exists():
        return
    session = TrainingJobs(section.region).session
    if missing := _missing(run.journal, directories):
        size = format_bytes(sum(output.size for output in missing))
        print(f"pulling {len(missing)} files, {size}, from {store} to {run.paths.root}", file=sys.stderr, flush=True)
        with explained(f"store {store}"):
            client = session.client("s3", connections=trees.CONNECTIONS)
            trees.pull_named(client, store, run.paths.root, [output.path for output in missing], "pull model")


def _stages(plan: Plan) -> list[str]:
    """The stages that write models and adapters."""
    return [stage for stage in ("download", "consolidate", "merge") if stage in plan]


def _missing(journal: Journal, directories: Collection[Path]) -> list[Output]:
    """The recorded files below the directories that are not here; a file appears only when it is complete."""
    records = map(journal.record, _stages(journal.plan))
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
