"""The store of a run: the tree below `cluster.root` in S3, and which of its files a stage needs and gives.

What a stage gives is what its record lists; the record is pushed last, so that the record of a stage in the store means
that its outputs are there too. Nothing that the kit did not write is ever deleted. Every method may be killed at any
line and called again; it transfers what is still missing. What containers pull is not flushed to disk: their disk ends
with them. All raise UserError for what a user can correct.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hyperpod_ft.aws.s3 import small_objects, trees
from hyperpod_ft.aws.s3.download import ObjectReplacedError
from hyperpod_ft.checkpoint.formats import resumable
from hyperpod_ft.checkpoint.sharded import description
from hyperpod_ft.digests import files_below
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.sagemaker.store.checkpoint_store import CheckpointStore
from hyperpod_ft.launch.snapshot import snapshot
from hyperpod_ft.publish import partial_of
from hyperpod_ft.runs.records import Record
from hyperpod_ft.runs.run import Run

# What `status`, `logs`, `list`, `compare` and `report` read of a run directory, and a training job that continues
# another; and the page that the last stage writes.
_STATE_FILES = ("jobs.json", "metrics.jsonl", "samples.json", "report.html")
_STATE_DIRECTORIES = ("attempts", "exits")
_REFERENCE = "reference"
_ATTEMPTS = 5
_FROZEN = ("run.yaml", "plan.json")


class RunStore:
    """The store of one run. `client` is boto3's for s3, with `trees.CONNECTIONS` connections."""

    def __init__(self, run: Run, client: Any) -> None:
        assert run.config.store, "a run in a store"
        self._run, self._client, self._url = run, client, run.config.store
        self._checkpoints = CheckpointStore(run, client, self._url)

    def push_run(self) -> None:
        """Push what the containers need of a run that is about to start: plan, scripts, jobs, and the kit's code."""
        code = snapshot(self._run.code_copies)
        directory = self._run.directory
        found = [directory / name for name in (*_FROZEN, *_STATE_FILES)]
        found += [file for name in ("sbatch", "provenance") for file in files_below(directory / name)]
        self._push([*files_below(code), *(file for file in found if file.is_file())], "run")

    def pull_run(self) -> None:
        """Pull what `push_run` has pushed, except the code."""
        self._pull([f"{self._directory}/{name}" for name in _FROZEN], "run")
        trees.pull(self._client, self._url, self._run.root, f"{self._directory}/sbatch", "run", flush=False)
        self.pull_records()

    def push_state(self) -> None:
        """Push the small files that change while a stage is at work: metrics, attempts, exit statuses; and the report.

        No records, which `push_stage` pushes, and no jobs, to which other machines may have added some.
        """
        directory, metrics = self._run.directory, self._run.metrics_path
        found = [file for name in (*_STATE_DIRECTORIES, _REFERENCE) for file in files_below(directory / name)]
        found += [file for file in [self._run.report_path] if file.exists()]
        self._push([file for file in found if not file.name.startswith(".")], "state")
        if metrics.exists():
            with tempfile.TemporaryDirectory(dir=directory, prefix=".pushing-") as held:
                # a copy: training appends to it
                copy = Path(shutil.copy(metrics, held))
                trees.push(self._client, f"{self._url}/{self._directory}", copy.parent, [copy], "push metrics")

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
            self._run.relative(self._run.record_path(stage.name)) for stage in self._run.plan.stages if stage.shared
        ]
        wanted += trees.listed(self._client, self._url, shared)
        trees.pull_entries(self._client, self._url, self._run.root, wanted)

    def push_stage(self, stage: str) -> None:
        """Push the outputs of a stage that has finished on this machine, and then its record.

        When the nodes of a training run share no volume, the first one calls this after `push_checkpoint`.
        """
        record = self._run.record(stage)
        if record is None:
            raise UserError(f"{self._run.record_path(stage)}: stage {stage} has no record", "run the stage first")
        files = [self._run.root / output.path for output in record.outputs]
        if stage == "precompile":
            files = files_below(self._run.neuron_cache)  # a graph is more than the output that stands for it
        for marker in _markers(files):
            self._checkpoints.check_pushed(marker.parent)
        self._push([file for file in files if file not in _markers(files)], stage)
        self._push(_markers(files), stage)
        self._push([self._run.record_path(stage)], stage)

    def push_finished(self, output: Path, what: str = "upload") -> list[str]:
        """Push the shards of a model that a stage has finished, while it writes the next one; returns their names.

        `output`: the directory that the stage will publish, such as `run.tuned_model`. `push_stage` skips these files.
        """
        partial = partial_of(output)
        digests = {partial / name: digest for name, digest in resumable.finished(partial).items()}
        there = {path: digest for path, digest in digests.items() if path.is_file()}
        try:
            trees.push(self._client, f"{self._url}/{self._run.relative(output)}", partial, there, what, there)
        except FileNotFoundError:  # just published
            return []
        return [path.name for path in there]

    def push_graphs(self, entries: Iterable[Path]) -> None:
        """Push compiled graphs: entries of the run's Neuron cache, files or directories, that are finished."""
        files = [file for entry in entries for file in files_below(entry) if file.suffix != ".lock"]
        self._push(files, "precompile")

    def pull_graphs(self) -> None:
        """Before compiling: pull the graphs that an earlier job has finished."""
        graphs = self._run.relative(self._run.neuron_cache)
        trees.pull(self._client, self._url, self._run.root, graphs, "pull precompile", flush=False)

    def pull_stage(self, stage: str) -> None:
        """Pull the outputs of a stage, and then its record. Raises UserError when the store does not have them."""
        record_name = self._run.relative(self._run.record_path(stage))
        content = small_objects.read(self._client, self._url, record_name)
        record = None if content is None else Record.parse(content)
        if record is None or record.fingerprint != self._run.plan[stage].fingerprint:
            raise UserError(
                f"{self._url}/{record_name}: is not a record of this run", f"run stage {stage} first, or submit the run"
            )
        if stage == "precompile":
            self.pull_graphs()
        self._pull([output.path for output in record.outputs], stage)
        for marker in _markers([self._run.root / output.path for output in record.outputs]):
            self._checkpoints.pull_rest(marker.parent)
        self._pull([record_name], stage)

    def pull_needs(self, stage: str) -> None:
        """Pull the records and outputs of the stages that a stage needs, except those that this machine has.

        Not those of `env`: each machine makes its own environment.
        """
        for need in self._run.plan[stage].needs:
            if need != "env" and not self._run.is_done(need):
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
        """Pull what training continues from besides its checkpoint, as far as this machine lacks it."""
        listed = trees.listing(self._client, f"{self._url}/{self._directory}")
        wanted = [entry for entry in listed if entry.name.startswith(("attempts/", f"{_REFERENCE}/", "metrics.jsonl"))]
        missing = [entry for entry in wanted if not (self._run.directory / entry.name).exists()]
        trees.pull_entries(self._client, f"{self._url}/{self._directory}", self._run.directory, missing, flush=False)

    def _push(self, files: Iterable[Path], what: str) -> None:
        trees.push(self._client, self._url, self._run.root, files, f"push {what}")

    def _pull(self, names: Iterable[str], what: str) -> None:
        trees.pull_named(self._client, self._url, self._run.root, names, f"pull {what}", flush=False)

    @property
    def _directory(self) -> str:
        return self._run.relative(self._run.directory)


def _until_none_is_replaced(pull: Callable[[], None]) -> None:
    """Pull small files again while others replace some of them. Raises ObjectReplacedError after five attempts."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            pull()
            return
        except ObjectReplacedError:
            if attempt == _ATTEMPTS:
                raise


def _markers(files: Iterable[Path]) -> list[Path]:
    """The files that complete a checkpoint."""
    return [file for file in files if file.name == description.NAME]
