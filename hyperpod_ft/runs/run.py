"""Run: one execution of a plan. Every path of a run, and of what runs share, is a property here."""

import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from hyperpod_ft import publish
from hyperpod_ft.config import run_file, yaml_text
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sources import Asset
from hyperpod_ft.digests import file_sha256, files_below, text_sha256
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.automatic.choice import Proposal, propose
from hyperpod_ft.planning.plan import Plan, plan
from hyperpod_ft.runs import base_model, job_files
from hyperpod_ft.runs.container import CONTAINER_PYTHON
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.records import Output, Record

JOB_COMMENT = "hyperpod-ft:"  # how the comment of every job of this kit begins
_JOBS = TypeAdapter(list[Job])
_PLAN = TypeAdapter(Plan)
_SIZES = TypeAdapter(dict[str, int])
BEST = "best"  # name of the checkpoint with the lowest validation loss
_STEP = re.compile(r"step-(\d{8})")


def checkpoint_name(step: int) -> str:
    """For example `step-00000400`."""
    return f"step-{step:08d}"


@dataclass(frozen=True)
class Run:
    """A resolved run file, its plan, and where its execution lives."""

    config: RunConfig
    plan: Plan
    proposal: Proposal | None = field(default=None, compare=False)  # of degrees, if they were just chosen

    @classmethod
    def of(cls, config: RunConfig) -> "Run":
        """The run of a resolved run file; with `parallelism.degrees: auto` its config has the degrees chosen.

        Raises UserError when the degrees do not divide, or cannot be chosen.
        """
        if config.parallelism.degrees == "manual":
            return cls(config, plan(config))
        proposal = propose(config, base_model.model_config(config))
        return cls(proposal.chosen.config, plan(proposal.chosen.config), proposal)

    @classmethod
    def open(cls, directory: Path) -> "Run":
        """The run in a run directory, as it was planned: another version of the kit may plan it differently.

        Raises UserError when it is not a run directory, is damaged, or was moved away from its root.
        """
        frozen = directory / "run.yaml"
        if not frozen.is_file():
            raise UserError(f"{directory}: no run.yaml in it", "give a run directory; `hyperpod-ft list` shows them")
        config = run_file.open_frozen(frozen)
        try:
            run = cls(config, _PLAN.validate_json((directory / "plan.json").read_bytes()))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{directory}: its plan.json is missing or damaged", f"submit {frozen} as a run file"
            ) from error
        if run.directory.resolve() != directory.resolve():
            raise UserError(
                f"{frozen}: was edited or moved: it describes the run {run.directory}",
                f"submit it as a run file: hyperpod-ft submit {frozen}",
            )
        return run

    @property
    def root(self) -> Path:
        return self.config.root

    @property
    def directory(self) -> Path:
        return self.root / "runs" / self.config.name / self.plan.run_id

    @property
    def full_name(self) -> str:
        """For example `dolly-llama/0123456789ab`."""
        return f"{self.config.name}/{self.plan.run_id}"

    def relative(self, path: Path) -> str:
        """The name of a path below `root` in records and in a store, which has the same tree."""
        return path.relative_to(self.root).as_posix()

    def store_url(self, path: Path) -> str:
        """Where the run's store has a path below `root`."""
        assert self.config.sagemaker and self.config.sagemaker.store, "a run in a store"
        return f"{self.config.sagemaker.store}/{self.relative(path)}"

    # What the run directory holds

    @property
    def config_path(self) -> Path:
        return self.directory / "run.yaml"

    @property
    def plan_path(self) -> Path:
        return self.directory / "plan.json"

    @property
    def jobs_path(self) -> Path:
        return self.directory / "jobs.json"

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    @property
    def checkpoints(self) -> Path:
        """Sharded checkpoints, one directory `step-00000400` each."""
        return self.directory / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / checkpoint_name(step)

    @property
    def best_checkpoint(self) -> Path:
        """The weights with the lowest validation loss, of a run with `training.keep_best`."""
        return self.checkpoints / BEST

    def checkpoints_by_step(self) -> dict[int, Path]:
        """Everything in `checkpoints` named like a checkpoint, complete or not, in ascending order of steps."""
        found = {
            int(match[1]): path for path in self.checkpoints.glob("step-*") if (match := _STEP.fullmatch(path.name))
        }
        return dict(sorted(found.items()))

    @property
    def trial(self) -> Path:
        """Where the trial of stage precompile may write; removed when it ends."""
        return self.directory / "precompile"

    @property
    def trial_facts(self) -> Path:
        """What the trial reports to stage precompile."""
        return self.trial / "facts.json"

    @property
    def reference(self) -> Path:
        """The log-probabilities of preferences before training (objective dpo), one .npy a split."""
        return self.directory / "reference"

    @property
    def reference_count(self) -> Path:
        """How many log-probabilities `reference` has."""
        return self.reference / "measured"

    @property
    def metrics_path(self) -> Path:
        """One JSON object a logged step."""
        return self.directory / "metrics.jsonl"

    @property
    def usage_path(self) -> Path:
        """How long each attempt at training has held its nodes, one file each."""
        return self.directory / "attempts" / "usage"

    @property
    def adapter(self) -> Path:
        """The consolidated PEFT adapter (method lora)."""
        return self.directory / "adapter"

    @property
    def tuned_model(self) -> Path:
        """The final Hugging Face model: merged (method lora), or consolidated (method full)."""
        return self.directory / ("merged" if self.plan.model_stage == "merge" else "consolidated")

    @property
    def samples_path(self) -> Path:
        return self.directory / "samples.json"

    @property
    def endpoint_proof(self) -> Path:
        """The answers of the run's endpoint to the prompts of samples.json, as `deploy` asked it last."""
        return self.directory / "endpoint.json"

    @property
    def provenance(self) -> Path:
        return self.directory / "provenance"

    @property
    def serving(self) -> Path:
        """Which job serves the run's model (`serve --on-node`), and where."""
        return self.directory / "serving"

    def script(self, stage: str) -> Path:
        return job_files.script(self.directory, stage)

    def job_name(self, stage: str) -> str:
        return f"{self.config.name}-{stage}"

    @property
    def job_comment(self) -> str:
        """Names this run directory in Slurm: two runs of one recipe below two roots are two runs.

        A digest, since Slurm's listings leave no path with spaces whole. `root` was made absolute when the run file
        was loaded.
        """
        return f"{JOB_COMMENT}{self.plan.run_id}@{text_sha256(str(self.directory))[:12]}"

    def log(self, stage: str, job_id: str) -> Path:
        """Slurm's `%x_%j.out`."""
        return job_files.log(self.directory, stage, job_id)

    def fetched_log(self, stage: str, job_id: str) -> Path:
        """What CloudWatch has of the log of a training job whose containers do not write to this volume."""
        return self.log(stage, job_id).with_suffix(".cloudwatch")

    def exit_marker(self, stage: str, job_id: str) -> Path:
        """Holds the exit status that the script's trap wrote."""
        return job_files.exit_marker(self.directory, stage, job_id)

    def cancel_marker(self, stage: str, job_id: str) -> Path:
        """Exists when the job was cancelled on purpose."""
        return self.exit_marker(stage, job_id).with_suffix(".cancelled")

    def restarts_path(self, stage: str) -> Path:
        """The attempts at a stage that were followed by another, oldest first."""
        return self.directory / "attempts" / f"{stage}.json"

    def attempt_directory(self, stage: str, job_id: str) -> Path:
        """The nodes' reports about a job's latest attempt at a training stage."""
        return self.directory / "attempts" / f"{stage}-{job_id}"

    @property
    def origin(self) -> Path:
        """Holds the run file or recipe that was submitted, with its overrides, as arguments of `submit`."""
        return self.provenance / "run-file"

    @property
    def store_listing(self) -> Path:
        """Sizes, by path relative to `root`, of recorded outputs that a store in S3 holds; only where runs of training
        jobs are submitted, which does not hold the outputs themselves."""
        return self.directory / "in-store.json"

    # What runs share

    @property
    def model_asset(self) -> Asset:
        return base_model.model_asset(self.config)

    @property
    def dataset_asset(self) -> Asset:
        return Asset(self.config.dataset.source, self.config.dataset.revision or "")

    @property
    def base_model(self) -> Path:
        return base_model.base_model(self.config)

    @property
    def raw_dataset(self) -> Path:
        """The dataset's own files. Which files are wanted is part of the name: two runs may want others."""
        wanted = text_sha256("\n".join(self.config.dataset.files))[:6]
        return self.root / "datasets" / "raw" / f"{self.dataset_asset.slug}-{wanted}"

    @property
    def dataset_path(self) -> Path:
        """The tokenized, packed dataset."""
        return self.root / "datasets" / self.plan["dataset"].fingerprint

    @property
    def neuron_cache(self) -> Path:
        """Compiled graphs of this run's shapes (on Trainium)."""
        return self.root / "neuron-cache" / self.plan["precompile"].fingerprint

    @property
    def compile_cache(self) -> Path:
        """What torch.compile made, by torch, Python and kind of device."""
        return self.root / "compile-cache"

    @property
    def code_copies(self) -> Path:
        """Copies of the kit's code, one for each content that jobs were submitted with."""
        return self.root / "code"

    @property
    def environment_path(self) -> Path:
        """The virtual environment that the `env` stage builds."""
        return self.root / "envs" / self.plan["env"].fingerprint

    @property
    def python(self) -> Path:
        """The interpreter of the stages that need torch; in a training job's container, its own."""
        given = os.environ.get(CONTAINER_PYTHON) or self.config.env.python
        return Path(given) if given else self.environment_path / "bin" / "python"

    def record_path(self, stage: str) -> Path:
        stage_plan = self.plan[stage]
        if stage_plan.shared:
            return self.root / "records" / f"{stage}-{stage_plan.fingerprint}.json"
        return self.directory / "records" / f"{stage}.json"

    def lock_path(self, stage: str) -> Path:
        """Locked while the stage works: two attempts at the same outputs take turns."""
        return self.record_path(stage).with_suffix(".lock")

    # What is known

    def record(self, stage: str) -> Record | None:
        return Record.read(self.record_path(stage))

    def why_not_done(self, stage: str) -> str:
        """Why the stage must run; empty when its record is valid and its outputs exist, here or in the run's store."""
        record = self.record(stage)
        if record is None:
            return "has not run"
        if record.fingerprint != self.plan[stage].fingerprint:
            return "its configuration changed"
        in_store = self.sizes_in_store()
        for output in record.outputs:
            try:
                size = (self.root / output.path).stat().st_size
            except OSError:
                if output.path not in in_store:
                    return f"{output.path} no longer exists"
                size = in_store[output.path]
            if size != output.size:
                return f"{output.path} has {size} bytes, was {output.size}"
        return ""

    def sizes_in_store(self) -> dict[str, int]:
        """What `store_listing` holds; empty without one."""
        try:
            return _SIZES.validate_json(self.store_listing.read_bytes())
        except (OSError, ValueError):
            return {}

    def is_done(self, stage: str) -> bool:
        return not self.why_not_done(stage)

    def jobs(self) -> list[Job]:
        """Every submission so far, oldest first."""
        try:
            return _JOBS.validate_json(self.jobs_path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except ValueError as error:
            raise UserError(
                f"{self.jobs_path}: is damaged", "restore it, or cancel the run's jobs (see squeue) and remove it"
            ) from error

    def latest_jobs(self) -> dict[str, Job]:
        """The newest submission of each stage."""
        return {job.stage: job for job in self.jobs()}

    def add_job(self, job: Job) -> None:
        publish.write_json(self.jobs_path, [asdict(known) for known in [*self.jobs(), job]])

    def outputs_of(self, paths: Iterable[Path], *, digests: bool = True) -> tuple[Output, ...]:
        """Outputs for a record: every file at or below `paths`, with its size and, unless `digests` is off, SHA-256."""
        files = [file for path in paths for file in files_below(path)]
        return tuple(
            Output(
                self.relative(file),
                file.stat().st_size,
                file_sha256(file) if digests else "",
            )
            for file in files
        )

    def freeze(self) -> None:
        """Write what `open` reads. Makes the directory; its run.yaml, which makes it a run's, comes last."""
        publish.write_json(self.plan_path, self.plan.as_dict())
        publish.write_text(self.config_path, self.yaml())

    def yaml(self) -> str:
        """The resolved run file."""
        return yaml_text.dump(self.config)
