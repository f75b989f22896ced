"""RunPaths: where the files of a run, and those that runs share, are on the volume."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.digests import text_sha256
from hyperpod_ft.planning.pins import EVALUATION_ENVIRONMENT, requirements
from hyperpod_ft.planning.plan import Plan
from hyperpod_ft.runs import assets, job_files
from hyperpod_ft.runs.training_paths import PathBelow, TrainingPaths


def runs_directory(root: Path) -> Path:
    """The directory of all runs, each in `<name>/<id>`."""
    return root / "runs"


def directory_of(root: Path, full_name: str) -> Path:
    """The directory of the run `name/id`."""
    return runs_directory(root) / full_name


def image_file(root: Path, given: str | None) -> Path | None:
    """The file of the image in `env.container`, of a run below `root`; None without one."""
    if given is None or given.startswith("/"):
        return Path(given) if given else None
    return root / "envs" / f"image-{text_sha256(given)[:16]}.sqsh"


@dataclass(frozen=True)
class RunPaths(TrainingPaths):
    """Every path of a run, from its resolved run file and its plan."""

    _config: RunConfig
    _plan: Plan

    @cached_property
    def root(self) -> Path:
        return self._config.root

    @cached_property
    def directory(self) -> Path:  # type: ignore[override]  # read only
        return directory_of(self.root, self.full_name)

    @property
    def full_name(self) -> str:
        """For example `dolly-llama/0123456789ab`."""
        return f"{self._config.name}/{self._plan.run_id}"

    def relative(self, path: Path) -> str:
        """The name of a path below `root` in records and in a store, which has the same tree."""
        return path.relative_to(self.root).as_posix()

    # What the run directory holds

    config_path = PathBelow("run.yaml")
    plan_path = PathBelow("plan.json")
    jobs_path = PathBelow("jobs.json")
    submit_lock = PathBelow("submit.lock")  # locked while jobs of the run are submitted
    logs = PathBelow("logs")
    layout_path = PathBelow("layout.json")  # of the newest attempt at training, or of the trial before it
    prompt_images = PathBelow("pictures")  # copies of those that prompts of section `generate` name, by digest
    trial_facts = PathBelow("trial.json")  # what the trial reports to stage precompile, which removes it
    usage_path = PathBelow("attempts", "usage")  # how long each attempt at training has held its nodes, a file each
    adapter = PathBelow("adapter")  # the consolidated PEFT adapter (method lora)
    samples_path = PathBelow("samples.json")
    report_path = PathBelow("report.html")  # the page about the finished run
    tracking = PathBelow("tracking")  # how far each tracker got, and what trackers keep as files of the run
    # the answers of the run's endpoint to the prompts of samples.json, as `deploy` asked it last
    endpoint_proof = PathBelow("endpoint.json")
    provenance = PathBelow("provenance")
    # the run file or recipe that was submitted, with its overrides, as arguments of `submit`
    origin = PathBelow("provenance", "run-file")
    serving = PathBelow("serving")  # which job serves the run's model (`serve --on-node`), and where
    secrets_directory = PathBelow("secrets")
    # sizes, by path relative to `root`, of recorded outputs that a store in S3 holds; only where runs of training jobs
    # are submitted, which does not hold the outputs themselves
    store_listing = PathBelow("in-store.json")
    # exists from `submit --force` on until stage `eval` has discarded the base model's scores
    evaluation_forced = PathBelow("evaluations", "forced")

    @property
    def slowest_ranks(self) -> Path:
        """Which rank worked longest in the steps of training, over time."""
        return job_files.slowest_ranks(self.directory)

    @property
    def tuned_model(self) -> Path:
        """The final Hugging Face model: merged (method lora), or consolidated (method full)."""
        return self.directory / ("merged" if self._plan.model_stage == "merge" else "consolidated")

    def script(self, stage: str) -> Path:
        return job_files.script(self.directory, stage)

    def secrets(self, stage: str) -> Path:
        """Variables for a stage's job that Slurm must not keep: a shell script that only its user can read."""
        return self.secrets_directory / stage

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

    # What runs share

    compile_cache = PathBelow("compile-cache", of="root")  # what torch.compile made, by torch, Python, kind of device
    code_copies = PathBelow("code", of="root")  # of the kit's code, one for each content that jobs were submitted with
    evaluation_hub = PathBelow("evaluations", "hub", of="root")  # HF_HOME of evaluations: the tasks' datasets

    @property
    def base_model(self) -> Path:
        return assets.base_model(self._config)

    @property
    def fetched_model(self) -> Path:
        """The model of `model.source`; the base model too, unless stage download makes that of it."""
        return assets.fetched_model(self._config)

    @property
    def starting_adapter(self) -> Path | None:
        """The adapter that training continues; None when it begins with a new one."""
        return assets.starting_adapter(self._config)

    @property
    def teacher(self) -> Path | None:
        """The model that training learns from (objective distillation)."""
        return assets.teacher(self._config)

    @property
    def fetched(self) -> tuple[Path, ...]:
        """What stage download fetches, in the order of `assets.assets`."""
        others = (path for path in (self.starting_adapter, self.teacher) if path)
        return (self.fetched_model, *others, *self.raw_datasets)

    @property
    def inputs(self) -> tuple[Path, ...]:
        """What stage download leaves for the other stages."""
        return (self.base_model, *self.fetched[1:])

    @property
    def raw_datasets(self) -> tuple[Path, ...]:
        """The own files of each of the dataset's sources, in the order of `Data.parts`."""
        return tuple(assets.raw_dataset(self._config, part.dataset) for part in self._config.dataset.parts)

    @property
    def dataset_path(self) -> Path:
        """The tokenized, packed dataset."""
        return self.root / "datasets" / self._plan["dataset"].fingerprint

    @property
    def neuron_cache(self) -> Path:
        """Compiled graphs of this run's shapes (on Trainium)."""
        return self.root / "neuron-cache" / self._plan["precompile"].fingerprint

    @property
    def environment_path(self) -> Path:
        """The virtual environment that the `env` stage builds."""
        return self.root / "envs" / self._plan["env"].fingerprint

    @property
    def image(self) -> Path | None:
        """The container's image: the file in `env.container`, or what stage `env` makes of a registry's."""
        return image_file(self.root, self._config.env.container)

    @property
    def python(self) -> Path:
        """The interpreter of the stages that need torch; with `env.container`, in the container."""
        given = self._config.env.python
        return Path(given) if given else self.environment_path / "bin" / "python"

    def tracker_pins(self, tracker: str) -> str:
        """The environment of pins/ with a tracker's packages; AWS's MLflow needs a plugin, which disturbs others."""
        address = self._config.cluster.environment.get("MLFLOW_TRACKING_URI", "")
        return "mlflow-sagemaker" if tracker == "mlflow" and address.startswith("arn:") else tracker

    def tracker_environment(self, tracker: str) -> Path:
        """The virtual environment of a tracker's packages. Not part of the plan: no stage's result depends on it."""
        pins = self.tracker_pins(tracker)
        return self.root / "envs" / f"{pins}-{text_sha256(' '.join(requirements(pins)))[:16]}"

    def tracker_python(self, tracker: str) -> Path:
        """The interpreter that publishes to a tracker; it may not exist."""
        given = self._config.tracking.python
        return Path(given) if given else self.tracker_environment(tracker) / "bin" / "python"

    @property
    def evaluation_environment(self) -> Path:
        """The virtual environment that stage `tasks` builds: this run's, with lm-evaluation-harness."""
        image = filter(None, [self._config.env.container])
        parts = [*requirements(EVALUATION_ENVIRONMENT), str(self.python), *image]
        return self.root / "envs" / f"eval-{text_sha256(chr(10).join(parts))[:16]}"

    @property
    def evaluation_python(self) -> Path:
        """The interpreter of stage `eval`."""
        given = self._config.eval.python if self._config.eval else None
        return Path(given) if given else self.evaluation_environment / "bin" / "python"

    @property
    def own_tasks(self) -> Path | None:
        """The copy of `eval.include_path`."""
        given = self._config.eval.include_revision if self._config.eval else None
        return self.root / "evaluations" / "tasks" / given if given else None

    @property
    def base_scores(self) -> Path:
        """The base model's scores, a file for the conditions of each evaluation."""
        return self.root / "evaluations" / "base" / self.base_model.name

    @property
    def tuned_scores(self) -> Path:
        """The tuned model's scores, a file for the conditions of each evaluation."""
        return self.directory / "evaluations" / self._plan[self._plan.model_stage].fingerprint

    def record_path(self, stage: str) -> Path:
        stage_plan = self._plan[stage]
        if stage_plan.shared:
            return Path(f"{self.root}/records/{stage}-{stage_plan.fingerprint}.json")
        if stage == "eval":  # a run may be evaluated several times
            stage = f"eval-{stage_plan.fingerprint}"
        return Path(f"{self.directory}/records/{stage}.json")

    def lock_path(self, stage: str) -> Path:
        """Locked while the stage works: two attempts at the same outputs take turns."""
        return self.record_path(stage).with_suffix(".lock")
