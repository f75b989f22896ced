"""Where a run, and what runs share, lie on the volume."""

import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.digests import text_sha256
from hyperpod_ft.planning.pins import EVALUATION_ENVIRONMENT, requirements
from hyperpod_ft.planning.plan import Plan
from hyperpod_ft.runs import assets, job_files
from hyperpod_ft.runs.container import CONTAINER_PYTHON

BEST = "best"  # name of the checkpoint with the lowest validation loss
_STEP = re.compile(r"step-(\d{8})")


def checkpoint_name(step: int) -> str:
    """For example `step-00000400`."""
    return f"step-{step:08d}"


def runs_directory(root: Path) -> Path:
    """The directory of all runs, each in `<name>/<id>`."""
    return root / "runs"


def directory_of(root: Path, full_name: str) -> Path:
    """The directory of the run `name/id`."""
    return runs_directory(root) / full_name


@dataclass(frozen=True)
class RunPaths:
    """Every path of a run, from its resolved run file and its plan."""

    config: RunConfig
    plan: Plan

    @cached_property
    def root(self) -> Path:
        return self.config.root

    @cached_property
    def directory(self) -> Path:
        return directory_of(self.root, self.full_name)

    @property
    def full_name(self) -> str:
        """For example `dolly-llama/0123456789ab`."""
        return f"{self.config.name}/{self.plan.run_id}"

    def relative(self, path: Path) -> str:
        """The name of a path below `root` in records and in a store, which has the same tree."""
        return path.relative_to(self.root).as_posix()

    def store_url(self, path: Path) -> str:
        """Where the run's store has a path below `root`."""
        assert self.config.store, "a run in a store"
        return f"{self.config.store}/{self.relative(path)}"

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
    def reference_log_probabilities(self) -> Path:
        """The log-probabilities of preferences before training (objective dpo), one .npy a split."""
        return self.directory / "reference"

    @property
    def reference_count(self) -> Path:
        """How many log-probabilities are measured."""
        return self.reference_log_probabilities / "measured"

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
    def report_path(self) -> Path:
        """The page about the finished run."""
        return self.directory / "report.html"

    @property
    def tracking(self) -> Path:
        """How far each tracker got, and what trackers keep as files of the run."""
        return self.directory / "tracking"

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
    def base_model(self) -> Path:
        return assets.base_model(self.config)

    @property
    def raw_dataset(self) -> Path:
        """The dataset's own files. Its name contains a digest of dataset.files: two runs may select different ones."""
        wanted = text_sha256("\n".join(self.config.dataset.files))[:6]
        return self.root / "datasets" / "raw" / f"{assets.dataset_asset(self.config).slug}-{wanted}"

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

    def tracker_environment(self, tracker: str) -> Path:
        """The virtual environment of a tracker's packages. Not part of the plan: no stage's result depends on it."""
        return self.root / "envs" / f"{tracker}-{text_sha256(' '.join(requirements(tracker)))[:16]}"

    def tracker_python(self, tracker: str) -> Path:
        """The interpreter that publishes to a tracker; it may not exist."""
        given = self.config.tracking.python
        return Path(given) if given else self.tracker_environment(tracker) / "bin" / "python"

    def trackers_to_install(self) -> list[str]:
        """The trackers that lack the environment that stage env makes."""
        if self.config.tracking.python:
            return []
        return [name for name in self.config.tracking.trackers if not self.tracker_python(name).exists()]

    @property
    def evaluation_environment(self) -> Path:
        """The virtual environment that stage `tasks` builds: this run's, with lm-evaluation-harness."""
        parts = [*requirements(EVALUATION_ENVIRONMENT), str(self.python)]
        return self.root / "envs" / f"eval-{text_sha256(chr(10).join(parts))[:16]}"

    @property
    def evaluation_python(self) -> Path:
        """The interpreter of stage `eval`."""
        given = self.config.eval.python if self.config.eval else None
        return Path(given) if given else self.evaluation_environment / "bin" / "python"

    @property
    def evaluation_hub(self) -> Path:
        """HF_HOME of evaluations: the datasets of the harness's tasks."""
        return self.root / "evaluations" / "hub"

    @property
    def own_tasks(self) -> Path | None:
        """The copy of `eval.include_path`."""
        given = self.config.eval.include_revision if self.config.eval else None
        return self.root / "evaluations" / "tasks" / given if given else None

    @property
    def base_scores(self) -> Path:
        """The base model's scores, a file for the conditions of each evaluation."""
        return self.root / "evaluations" / "base" / assets.model_asset(self.config).slug

    @property
    def tuned_scores(self) -> Path:
        """The tuned model's scores, a file for the conditions of each evaluation."""
        return self.directory / "evaluations" / self.plan[self.plan.model_stage].fingerprint

    @property
    def evaluation_forced(self) -> Path:
        """Exists from `submit --force` on until stage `eval` has discarded the base model's scores."""
        return self.directory / "evaluations" / "forced"

    def evaluation_records(self) -> list[Path]:
        """The records of stage `eval`, one for each set of tasks and settings."""
        return sorted((self.directory / "records").glob("eval-*.json"))

    def record_path(self, stage: str) -> Path:
        stage_plan = self.plan[stage]
        if stage_plan.shared:
            return Path(f"{self.root}/records/{stage}-{stage_plan.fingerprint}.json")
        if stage == "eval":  # a run may be evaluated several times
            stage = f"eval-{stage_plan.fingerprint}"
        return Path(f"{self.directory}/records/{stage}.json")

    def lock_path(self, stage: str) -> Path:
        """Locked while the stage works: two attempts at the same outputs take turns."""
        return self.record_path(stage).with_suffix(".lock")
