"""What the client and the containers of training jobs see of a run: by one file system, or by a store in S3."""

import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyperpod_ft import publish
from hyperpod_ft.aws.s3 import objects, trees
from hyperpod_ft.aws.session import Session, explained
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.plan import Plan
from hyperpod_ft.progress import format_bytes
from hyperpod_ft.runs.journal import Journal
from hyperpod_ft.runs.records import Output, Record, unix_time
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import RunPaths
from hyperpod_ft.sagemaker.groups import run_files
from hyperpod_ft.sagemaker.section import store_of, store_url
from hyperpod_ft.sagemaker.store.stored_checkpoints import stored_outputs

if TYPE_CHECKING:
    from hyperpod_ft.sagemaker.store.run_store import RunStore


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


@dataclass(frozen=True)
class StoreSync(RunSync):
    """A store in S3 holds the run; this machine has a copy of its small files."""

    run: Run
    url: str
    client: Any  # boto3's for s3

    def prepare(self) -> None:
        """Stages that were done on this machine, such as a download with a token of the Hub, are pushed too.

        Not `env`: each container makes its own environment. Nor what no container runs, or needs.
        """
        store = self._store()
        store.push_run()
        for stage in self.run.plan.stages:
            if (
                stage.name not in ("env", "tasks", "eval")
                and self.run.journal.is_done(stage.name)
                and not self._in_store(stage.name)
            ):
                store.push_stage(stage.name)

    def refresh(self) -> None:
        self._store().pull_records()
        records = [record for stage in self.run.plan.stages if (record := self.run.journal.record(stage.name))]
        names = {path: name for record in records for path, name in stored_outputs(self.run.paths, record).items()}
        sizes = {entry.name: entry.size for entry in trees.listed(self.client, self.url, names.values())}
        known = {path: sizes[name] for path, name in sorted(names.items()) if name in sizes}
        publish.write_json(self.run.paths.store_listing, known)

    def has_run_files(self) -> bool:
        directory = self.run.paths.directory
        return trees.has(self.client, f"{self.url}/{self.run.paths.relative(directory)}", run_files(directory))

    def push(self, files: Iterable[Path]) -> None:
        trees.push(self.client, self.url, self.run.paths.root, files)

    def discard(self, stages: Sequence[str]) -> None:
        """Raises UserError for a training run that is done: a new one would continue from the store's checkpoints."""
        names = {stage: self.run.paths.relative(self.run.paths.record_path(stage)) for stage in stages}
        there = {entry.name for entry in trees.listed(self.client, self.url, names.values())}
        if names.get("train") in there:
            directory = store_url(self.run, self.run.paths.directory)
            raise UserError(
                f"--force: stage train: a new training would continue from {directory}/checkpoints",
                f"move that away first, and remove {directory}/records/train.json (aws s3 mv --recursive, rm)",
            )
        objects.remove(self.client, self.url, there)

    def _store(self) -> "RunStore":
        from hyperpod_ft.sagemaker.store.run_store import RunStore  # noqa: PLC0415 - imports numpy, which others need not

        return RunStore(self.run, self.client)

    def _in_store(self, stage: str) -> bool:
        """Whether the store has all that a stage recorded, as of the last `refresh`; not known of a record alone."""
        record, sizes = self.run.journal.record(stage), self.run.journal.sizes_in_store()
        outputs = record.outputs if record else ()
        return bool(outputs) and all(sizes.get(output.path) == output.size for output in outputs)


def sync_of(run: Run, session: Session) -> RunSync:
    store = store_of(run.config)
    if store is None:
        return RunSync()
    with explained(f"store {store}"):
        return StoreSync(run, store, session.client("s3"))


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


def _model_stages(plan: Plan) -> list[str]:
    """The stages that write models and adapters."""
    return [stage for stage in ("download", "consolidate", "merge") if stage in plan]


def _missing(journal: Journal, directories: Collection[Path]) -> list[Output]:
    """The recorded files below the directories that are not here; a file appears only when it is complete."""
    records = map(journal.record, _model_stages(journal.plan))
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
