"""The store of a run: the tree below `cluster.root` in S3, and which of its files a stage needs and gives.

What a stage gives is what its record lists; the record is pushed last, so that the record of a stage in the store means
that its outputs are there too. Nothing that the kit did not write is ever deleted. Every method may be killed at any
line and called again; it transfers what is still missing. What containers pull is not flushed to disk: their disk ends
with them. All raise UserError for what a user can correct.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from hyperpod_ft import publish
from hyperpod_ft.aws.s3 import objects, trees
from hyperpod_ft.aws.s3.objects import ObjectReplacedError
from hyperpod_ft.checkpoint.formats import resumable
from hyperpod_ft.checkpoint.sharded import description
from hyperpod_ft.digests import files_below
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.snapshot import snapshot
from hyperpod_ft.runs.assets import assets
from hyperpod_ft.runs.records import Record
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker.groups import FROZEN, run_files
from hyperpod_ft.sagemaker.section import store_of, store_url
from hyperpod_ft.sagemaker.store.checkpoint_store import CheckpointStore
from hyperpod_ft.sagemaker.store.stored_checkpoints import recorded_name, stored_outputs
from hyperpod_ft.sagemaker.store.sync import RunSync

# What `status`, `logs`, `list`, `compare` and `report` read of a run directory, and a training job that continues
# another. Not the page about the run: a browser runs what is in it, so each machine makes its own.
# Of these, what a training writes while it is at work.
_GROWING = ("metrics.jsonl", "sampled.json", "slowest.jsonl")
_STATE_FILES = ("jobs.json", "samples.json", *_GROWING)
_STATE_DIRECTORIES = ("attempts", "exits")
_REFERENCE = "reference"
_ATTEMPTS = 5


class RunStore(RunSync):
    """The store of one run, of whose small files this machine has a copy. `client` is boto3's for s3."""

    def __init__(self, run: Run, client: Any) -> None:
        store = store_of(run.config)
        assert store, "a run in a store"
        self._run, self._client, self._url = run, client, store
        self._checkpoints = CheckpointStore(run, client, self._url)

    def prepare(self) -> None:
        """Stages that were done on this machine, such as a download with a token of the Hub, are pushed too.

        Not `env`: each container makes its own environment. Nor what no container runs, or needs.
        """
        self.push_run()
        for stage in self._run.plan.stages:
            if (
                stage.name not in ("env", "tasks", "eval")
                and self._run.journal.is_done(stage.name)
                and not self._in_store(stage.name)
            ):
                self.push_stage(stage.name)

    def refresh(self) -> None:
        self.pull_records()
        records = [record for stage in self._run.plan.stages if (record := self._run.journal.record(stage.name))]
        names = {path: name for record in records for path, name in stored_outputs(self._run.paths, record).items()}
        sizes = {entry.name: entry.size for entry in trees.listed(self._client, self._url, names.values())}
        known = {path: sizes[name] for path, name in sorted(names.items()) if name in sizes}
        publish.write_json(self._run.paths.store_listing, known)

    def has_run_files(self) -> bool:
        directory = self._run.paths.directory
        return trees.has(self._client, f"{self._url}/{self._run.paths.relative(directory)}", run_files(directory))

    def push(self, files: Iterable[Path]) -> None:
        trees.push(self._client, self._url, self._run.paths.root, files)

    def discard(self, stages: Sequence[str]) -> None:
        """Raises UserError for a training run that is done: a new one would continue from the store's checkpoints."""
        names = {stage: self._run.paths.relative(self._run.paths.record_path(stage)) for stage in stages}
        there = {entry.name for entry in trees.listed(self._client, self._url, names.values())}
        if names.get("train") in there:
            directory = store_url(self._run, self._run.paths.directory)
            raise UserError(
                f"--force: stage train: a new training would continue from {directory}/checkpoints",
                f"move that away first, and remove {directory}/records/train.json (aws s3 mv --recursive, rm)",
            )
        objects.remove(self._client, self._url, there)

    def _in_store(self, stage: str) -> bool:
        """Whether the store has all that a stage recorded, as of the last `refresh`; not known of a record alone."""
        record, sizes = self._run.journal.record(stage), self._run.journal.sizes_in_store()
        outputs = record.outputs if record else ()
        return bool(outputs) and all(sizes.get(output.path) == output.size for output in outputs)

    def push_run(self) -> None:
        """Push what the containers need of a run that is about to start: plan, scripts, jobs, and the kit's code.

        Also a model or a dataset of this machine, which stage download could not find in a container.
        """
        code = snapshot(self._run.paths.code_copies)
        directory = self._run.paths.directory
        found = [directory / name for name in (*FROZEN, *_STATE_FILES)]
        found += [file for name in ("sbatch", "provenance") for file in files_below(directory / name)]
        self._push([*files_below(code), *(file for file in found if file.is_file())], "run")
        if not self._run.journal.is_done("download"):
            for local in self._local_assets():
                self._push(files_below(local), local.name)

    def push_state(self) -> None:
        """Push the small files that change while a stage is at work: metrics, attempts, exit statuses.

        No records, which `push_stage` pushes, and no jobs, to which other machines may have added some.
        """
        directory = self._run.paths.directory
        found = [file for name in (*_STATE_DIRECTORIES, _REFERENCE) for file in files_below(directory / name)]
        self._push([file for file in found if not file.name.startswith(".")], "state")
        if growing := [directory / name for name in _GROWING if (directory / name).exists()]:
            with tempfile.TemporaryDirectory(dir=directory, prefix=".pushing-") as held:
                # copies: training appends to them, or replaces them
                copies = [Path(shutil.copy(file, held)) for file in growing]
                trees.push(self._client, f"{self._url}/{self._directory}", Path(held), copies, "push metrics")

    def pull_records(self) -> None:
        """Pull the small files that `status`, `logs` and `list` read: records, jobs, metrics, attempts, exit statuses.

        They replace those on this machine. A training run that is at work may be replacing some of them.
        """
        _until_none_is_replaced(self._pull_records)

    def _pull_records(self) -> None:
        directories = tuple(f"{self._directory}/{name}/" for name in ("records", *_STATE_DIRECTORIES))
        single = {f"{self._directory}/{name}" for name in _STATE_FILES}
        listed = trees.listing(self._client, self._url, self._directory)
        wanted = [entry for entry in listed if entry.name in single or entry.name.startswith(directories)]
        shared = [
            self._run.paths.relative(self._run.paths.record_path(stage.name))
            for stage in self._run.plan.stages
            if stage.shared
        ]
        wanted += trees.listed(self._client, self._url, shared)
        trees.pull_entries(self._client, self._url, self._run.paths.root, wanted)

    def push_stage(self, stage: str) -> None:
        """Push the outputs of a stage that has finished on this machine, and then its record.

        When the nodes of a training run share no volume, the first one calls this after `push_checkpoint`. Raises
        UserError when not all of a checkpoint is in the store afterwards.
        """
        record = self._run.journal.record(stage)
        if record is None:
            raise UserError(f"{self._run.paths.record_path(stage)}: stage {stage} has no record", "run the stage first")
        for output in record.outputs:  # the record may be a forged one, that this machine pulled from the store
            self._require_place_of_output(output.path)
        files = [self._run.paths.root / output.path for output in record.outputs]
        if stage == "precompile":
            files = files_below(self._run.paths.neuron_cache)  # a graph is more than the output that stands for it
        checkpoints, others = _apart(files)
        for directory in checkpoints:
            if not self._checkpoints.push(directory):  # does nothing if it is there
                raise UserError(f"{directory}: cannot be pushed", "run the stage again")
        self._push(others, stage)
        self._push([self._run.paths.record_path(stage)], stage)

    def push_finished(self, output: Path, what: str = "upload") -> list[str]:
        """Push the shards of a model that a stage has finished, while it writes the next one; returns their names.

        `output`: what the stage will publish, such as `paths.tuned_model`. `push_stage` skips these files.
        """
        partial = publish.partial_of(output)
        digests = {partial / name: digest for name, digest in resumable.finished(partial).items()}
        there = {path: digest for path, digest in digests.items() if path.is_file()}
        try:
            trees.push(self._client, f"{self._url}/{self._run.paths.relative(output)}", partial, there, what, there)
        except FileNotFoundError:  # just published
            return []
        return [path.name for path in there]

    def push_graphs(self, entries: Iterable[Path]) -> None:
        """Push compiled graphs: entries of the run's Neuron cache, files or directories, that are finished."""
        files = [file for entry in entries for file in files_below(entry) if file.suffix != ".lock"]
        self._push(files, "precompile")

    def pull_graphs(self) -> None:
        """Before compiling: pull the graphs that an earlier job has finished."""
        graphs = self._run.paths.relative(self._run.paths.neuron_cache)
        trees.pull(self._client, self._url, self._run.paths.root, graphs, "pull precompile", flush=False)

    def pull_stage(self, stage: str) -> None:
        """Pull the outputs of a stage, and then its record. Raises UserError when the store does not have them."""
        record_name = self._run.paths.relative(self._run.paths.record_path(stage))
        content = objects.read(self._client, self._url, record_name)
        record = None if content is None else Record.parse(content)
        if record is None or record.fingerprint != self._run.plan[stage].fingerprint:
            raise UserError(
                f"{self._url}/{record_name}: is not a record of this run", f"run stage {stage} first, or submit the run"
            )
        for output in record.outputs:
            self._require_place_of_output(output.path)
        if stage == "precompile":
            self.pull_graphs()
        checkpoints, others = _apart(self._run.paths.root / output.path for output in record.outputs)
        self._pull(map(self._run.paths.relative, others), stage)
        for directory in checkpoints:
            self._checkpoints.pull_named(recorded_name(directory, record), directory)
        self._pull([record_name], stage)

    def pull_needs(self, stage: str) -> None:
        """Pull the records and outputs of the stages that a stage needs, except those that this machine has.

        Not those of `env`: each machine makes its own environment.
        """
        for local in self._local_assets() if stage == "download" else ():
            trees.pull(
                self._client, self._url, self._run.paths.root, self._run.paths.relative(local), local.name, flush=False
            )
        for need in self._run.plan[stage].needs:
            if need != "env" and not self._run.journal.is_done(need):
                self.pull_stage(need)

    def push_checkpoint(self, directory: Path, node: int = 0, nodes: int = 1) -> bool:
        """Push a checkpoint that training has published, and what else continuing from it needs.

        Every node calls it for its own files; see `CheckpointStore.push`.
        """
        if not node:
            self.push_state()
        return self._checkpoints.push(directory, node, nodes)

    def pull_checkpoint(self, step: int | None = None) -> Path | None:
        """Before training: pull the newest complete checkpoint, and what else training continues from.

        Every node calls it and gets the files of all; the nodes after the first one with the `step` of the checkpoint
        that the first one got, 0 if it got none. Returns the checkpoint's directory; None without one. Raises UserError
        when all are damaged.
        """
        found = None if step == 0 else self._checkpoints.pull(step)
        _until_none_is_replaced(self._pull_state)
        return found

    def _pull_state(self) -> None:
        """Pull the other files that a resumed training needs, unless they are already here."""
        listed = trees.listing(self._client, f"{self._url}/{self._directory}")
        wanted = [entry for entry in listed if entry.name.startswith(("attempts/", f"{_REFERENCE}/", *_GROWING))]
        missing = [entry for entry in wanted if not (self._run.paths.directory / entry.name).exists()]
        trees.pull_entries(
            self._client, f"{self._url}/{self._directory}", self._run.paths.directory, missing, flush=False
        )

    def _require_place_of_output(self, name: str) -> None:
        """Raise UserError when no stage leaves anything there.

        A forged record could have a script or code replaced, or a private file of this machine pushed.
        """
        run, path = self._run, PurePosixPath(name)
        own = (
            "adapter",
            "checkpoints",
            "consolidated",
            "merged",
            run.paths.metrics_path.name,
            run.paths.samples_path.name,
        )
        places = [
            *run.paths.inputs,
            run.paths.dataset_path,
            *(run.paths.directory / place for place in own),
        ]
        places += [run.paths.neuron_cache] if "precompile" in run.plan else []
        if ".." in path.parts or not any(path.is_relative_to(run.paths.relative(place)) for place in places):
            raise UserError(
                f"{self._url}/{name}: is listed in a record but is not an output of its stage",
                "somebody has changed the record; remove it from the store, and submit the run again",
            )

    def _local_assets(self) -> list[Path]:
        """The directories of what stage download takes from the machine that submits."""
        found = zip(self._run.paths.fetched, assets(self._run.config), strict=True)
        return list(dict.fromkeys(directory for directory, (_, _, asset) in found if asset.kind == "local"))

    def _push(self, files: Iterable[Path], what: str) -> None:
        trees.push(self._client, self._url, self._run.paths.root, files, f"push {what}")

    def _pull(self, names: Iterable[str], what: str) -> None:
        trees.pull_named(self._client, self._url, self._run.paths.root, names, f"pull {what}", flush=False)

    @property
    def _directory(self) -> str:
        return self._run.paths.relative(self._run.paths.directory)


def _until_none_is_replaced(pull: Callable[[], None]) -> None:
    """Pull small files again while others replace some of them. Raises ObjectReplacedError after five attempts."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            pull()
            return
        except ObjectReplacedError:
            if attempt == _ATTEMPTS:
                raise


def _apart(outputs: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """The checkpoints among the outputs of a stage, and its other files."""
    files = list(outputs)
    checkpoints = [file.parent for file in files if file.name == description.NAME]
    return checkpoints, [file for file in files if not any(found in file.parents for found in checkpoints)]
