"""Where the jobs run, in which environment, and who hears of them: sections `cluster`, `env` and `tracking`."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from hyperpod_ft.config.fields import (
    NonNegativeInt,
    PackageRepository,
    PlainPath,
    PositiveFloat,
    PositiveInt,
    Section,
    SlurmWord,
    TimeLimit,
    matches,
    no_control_characters,
    plain_path,
    shortened,
    shown,
)
from hyperpod_ft.config.instances import CATALOGUE, alternatives
from hyperpod_ft.config.secrets import is_secret

# An image of a registry, with a tag or digest: a name alone would be another image every month.
_DIGEST = "@sha256:[0-9a-f]{64}"
_TAG = f"(:[A-Za-z0-9_][A-Za-z0-9._-]*({_DIGEST})?|{_DIGEST})"
_IMAGE = re.compile(rf"[a-z0-9][a-z0-9._-]*(:\d+)?(/[a-z0-9._-]+)*{_TAG}")
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# The job scripts set these.
_RESERVED_NAMES = re.compile(
    r"RUN_DIR|PATH|PYTHON.*|BASH_.*|HYPERPOD_FT_.*|SLURM_.*|SBATCH_.*|MASTER_(ADDR|PORT)|python|TMPDIR|OMP_NUM_THREADS"
    r"|(HF_HUB|TRANSFORMERS)_OFFLINE|TORCHELASTIC_.*"
)
PROJECT = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
PROJECT_CHARACTERS = "letters, digits, dots, underscores and hyphens"
Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class Cluster(Section):
    """Where the jobs run."""

    root: PlainPath = Field(
        "/fsx/hyperpod-ft",
        description="Directory on the shared volume for models, datasets, environments and runs.",
    )
    instance_type: str = Field(
        "local",
        description="Instance type of the training nodes, such as `p5.48xlarge` or `trn1.32xlarge`. `local` trains on"
        " the CPUs of any machine, a type such as `c7i.4xlarge` on its own CPUs.",
    )
    nodes: PositiveInt = Field(1, le=10_000, description="Number of training nodes.")
    min_nodes: PositiveInt | None = Field(
        None,
        description="On Slurm, the fewest nodes to train on while there are no more (engine torch, not on Trainium;"
        " docs/reliability.md#continue-elsewhere).",
    )
    partition: SlurmWord | None = Field(
        None,
        description="Slurm partition of the stages that use accelerators, not HyperPod's `dev`. `cluster create` names"
        " it after the instance family, such as `p5`.",
    )
    cpu_partition: SlurmWord | None = Field(
        None, description="Slurm partition of the stages that use only CPUs; `partition` if not set."
    )
    account: SlurmWord | None = Field(None, description="Slurm account to charge.")
    qos: SlurmWord | None = Field(None, description="Slurm quality of service.")
    reservation: SlurmWord | None = Field(None, description="Slurm reservation to run in.")
    time_limit: TimeLimit = Field(
        "1-00:00:00",
        description="Time limit of the stages that train, as Slurm writes it: [days-]hours:minutes:seconds.",
    )
    cpu_time_limit: TimeLimit = Field("08:00:00", description="Time limit of every other stage.")
    max_restarts: NonNegativeInt = Field(
        3,
        description="Largest number of restarts of training after a crash or hang. Time limits and requeues by Slurm"
        " itself do not count. In SageMaker training jobs, lost instances count, and SageMaker retries each job this"
        " often after its own errors.",
    )
    cpus_per_cpu_stage: PositiveInt = Field(
        8,
        description="CPUs for stages `dataset`, `generate` and `eval` when they run on CPUs.",
    )
    memory_gb_per_cpu_stage: PositiveInt | None = Field(
        None, description="Memory of each CPU stage, in GB; Slurm's default if not set."
    )
    price_per_node_hour: PositiveFloat | None = Field(
        None,
        description="Price of a training node per hour, in your currency, for `status`, `compare` and the report.",
    )
    mail_user: Annotated[str, matches(r"[A-Za-z0-9][A-Za-z0-9._+@-]{0,127}", "an e-mail address")] | None = Field(
        None,
        description="Address that Slurm mails when a job fails, times out or can never start. Not for SageMaker"
        " training jobs: `sagemaker setup --mail`.",
    )
    environment: dict[str, str] = Field(
        default_factory=dict,
        description="More environment variables for every job. No secrets (docs/security.md), and none that the"
        " job scripts set: `PATH`, `PYTHON*`, `BASH_*`, `SLURM_*`, `SBATCH_*`, `TMPDIR`, `OMP_NUM_THREADS`, ...",
    )

    @field_validator("instance_type")
    @classmethod
    def _known_instance(cls, value: str) -> str:
        name = value.removeprefix("ml.")
        if name not in CATALOGUE:
            raise ValueError(f"unknown instance type; {alternatives(name)}")
        return name

    @model_validator(mode="after")
    def _fewer_nodes(self) -> "Cluster":
        if (self.min_nodes or 1) > self.nodes:
            raise ValueError(f"min_nodes: {self.min_nodes} is more than nodes: {self.nodes}")
        return self

    @field_validator("environment")
    @classmethod
    def _plain_environment(cls, value: dict[str, str]) -> dict[str, str]:
        for name, content in value.items():
            if not _ENVIRONMENT_NAME.fullmatch(name):
                raise ValueError(f"{shown(name)} is not a valid name of an environment variable")
            if _RESERVED_NAMES.fullmatch(name):
                raise ValueError(f"{shortened(name)} is set by the job scripts; remove it")
            if is_secret(name, content):
                raise ValueError(
                    f"{shortened(name)} looks like a secret; export it in the shell that submits to Slurm, for the"
                    " stages that fetch or publish, or keep it in a file that the nodes can read"
                )
            no_control_characters(content)
        return value


class PythonEnvironment(Section):
    """The Python environment of the stages that use torch."""

    python: PlainPath | None = Field(
        None,
        description="Interpreter to use, or `current`: hyperpod-ft's own. If not set, stage `env` creates a virtual"
        " environment below `cluster.root`. With `container`, a path in it.",
    )
    container: str | None = Field(
        None,
        description="On Slurm with Pyxis, image for the jobs (docs/install.md#containers): `registry/name:tag`"
        " (digests: enroot 4.0 or newer), or a `.sqsh` file's absolute path.",
    )
    container_mounts: tuple[PlainPath, ...] = Field(
        (),
        description="More directories that jobs see.",
    )
    sdk: Literal["2.26.1", "2.28.0"] = Field(
        "2.26.1",
        description="Engine neuron: AWS Neuron SDK to install; optimum-neuron 0.4.5 was released with `2.26.1`.",
    )
    package_repositories: tuple[PackageRepository, ...] = Field(
        (),
        description="Trainium: URLs of package indexes, or directories of wheels"
        " (docs/engines.md#trainium-engines-torch-and-neuron).",
    )

    @field_validator("container")
    @classmethod
    def _image(cls, value: str | None) -> str | None:
        if value is None or (value.startswith("/") and value.endswith(".sqsh") and plain_path(value)):
            return value
        name = value.removeprefix("docker://").replace("#", "/", 1)
        if not _IMAGE.fullmatch(name):
            raise ValueError(
                "must be an image with its tag or digest, such as public.ecr.aws/docker/library/python:3.12, or the"
                " absolute path of a .sqsh file"
            )
        return name

    @model_validator(mode="after")
    def _mounts_of_a_container(self) -> "PythonEnvironment":
        if self.container_mounts and self.container is None:
            raise ValueError("container_mounts: has no effect without container; remove it")
        return self


class Tracking(Section):
    """Experiment trackers (docs/seeing-a-run.md). Changes nothing in the run."""

    trackers: tuple[Tracker, ...] = Field(
        (),
        description="Where metrics, the run file and final figures are published: any of `tensorboard`, `wandb`"
        " (Weights & Biases), `mlflow`, `trackio`.",
    )
    project: Annotated[str, matches(PROJECT, PROJECT_CHARACTERS)] | None = Field(
        None, description="Project (W&B, Trackio) or experiment (MLflow); the run's `name` if not set."
    )
    python: PlainPath | None = Field(
        None,
        description="Interpreter with the trackers' packages, or `current`: hyperpod-ft's own. If not set, stage"
        " `env` creates a virtual environment for each tracker.",
    )
