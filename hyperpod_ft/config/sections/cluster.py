"""Where the jobs run, in which environment, and who hears of them: sections `cluster`, `env` and `tracking`."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

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
    shortened,
    shown,
)
from hyperpod_ft.config.instances import CATALOGUE, alternatives
from hyperpod_ft.config.secrets import is_secret

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
        description="Directory on the shared volume; models, datasets, environments and runs are kept below it."
        " A relative path is relative to the run file's directory.",
    )
    instance_type: str = Field(
        "local",
        description="Instance type of the training nodes; `local` trains on the CPUs of any machine, and CPU types"
        " such as `c7i.4xlarge` train on their CPUs.",
    )
    nodes: PositiveInt = Field(1, le=10_000, description="Number of training nodes.")
    partition: SlurmWord | None = Field(
        None,
        description="Slurm partition of the stages that use accelerators. On a cluster of `hyperpod-ft cluster create`"
        " the family of the instance type, such as `trn1`; HyperPod's default partition `dev` has all nodes, those for"
        " login included.",
    )
    cpu_partition: SlurmWord | None = Field(
        None, description="Slurm partition of the stages that use only CPUs; the same as `partition` if not set."
    )
    account: SlurmWord | None = Field(None, description="Slurm account to charge.")
    qos: SlurmWord | None = Field(None, description="Slurm quality of service.")
    reservation: SlurmWord | None = Field(None, description="Slurm reservation to run in.")
    time_limit: TimeLimit = Field(
        "1-00:00:00",
        description="Time limit of the stages that train, in Slurm's format [days-]hours:minutes:seconds.",
    )
    cpu_time_limit: TimeLimit = Field("08:00:00", description="Time limit of each of the other stages.")
    max_restarts: NonNegativeInt = Field(
        3,
        description="How many times the ranks of a job are restarted from the newest checkpoint after a crash"
        " before the job counts as failed. Restarts after the time limit are not counted, nor are those that Slurm"
        " itself makes by requeueing the job of a lost node. For SageMaker training jobs, crashes and lost instances"
        " are counted over all jobs of a submission; SageMaker also retries each job up to this many times after its"
        " own internal errors.",
    )
    cpus_per_cpu_stage: PositiveInt = Field(
        8,
        description="CPUs requested for stages `dataset` and `generate` when they run on CPUs; `env` requests 1, and"
        " `download`, `consolidate` and `merge` 2 each. At most 2 on instance type `local`.",
    )
    memory_gb_per_cpu_stage: PositiveInt | None = Field(
        None, description="Memory requested for each stage that uses only CPUs, in GB; Slurm's default if not set."
    )
    price_per_node_hour: PositiveFloat | None = Field(
        None,
        description="Price of one training node per hour, in your currency. If set, the record of the training,"
        " `status` and `compare` show its cost.",
    )
    mail_user: Annotated[str, matches(r"[A-Za-z0-9][A-Za-z0-9._+@-]{0,127}", "an e-mail address")] | None = Field(
        None,
        description="Address that Slurm mails when a job fails, reaches its time limit, or can never start. Has no"
        " effect on SageMaker training jobs: docs/training-jobs.md shows an EventBridge rule for them.",
    )
    environment: dict[str, str] = Field(
        default_factory=dict,
        description="Additional environment variables of every job. Not for secrets: docs/security.md says how"
        " jobs get those of the shell that submits.",
    )

    @field_validator("instance_type")
    @classmethod
    def _known_instance(cls, value: str) -> str:
        name = value.removeprefix("ml.")
        if name not in CATALOGUE:
            raise ValueError(f"unknown instance type; {alternatives(name)}")
        return name

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
        description="Path of an existing interpreter to use, or `current` for the one that runs hyperpod-ft. If not"
        " set, the `env` stage creates a virtual environment below `cluster.root`.",
    )
    sdk: Literal["2.26.1", "2.28.0"] = Field(
        "2.26.1",
        description="Engine neuron: the version of the AWS Neuron SDK to install. optimum-neuron 0.4.5 was released"
        " with `2.26.1`; `2.28.0` is newer.",
    )
    package_repositories: tuple[PackageRepository, ...] = Field(
        (),
        description="On Trainium: where pip finds the Neuron packages and a PyTorch build without CUDA: URLs of"
        " package indexes (AWS's Neuron repository and PyTorch's index of CPU builds), or directories of wheels. If"
        " not set, pip's own configuration must name them.",
    )


class Tracking(Section):
    """Experiment trackers that show a training run's metrics while it runs. Changes nothing in the run."""

    trackers: tuple[Tracker, ...] = Field(
        (),
        description="Where the rows of metrics.jsonl, the run file and the final figures are published, any of"
        " `tensorboard`, `wandb` (Weights & Biases), `mlflow` and `trackio`. Each is set up by its own environment"
        " variables (docs/tracking.md); keys come from the shell that submits.",
    )
    project: Annotated[str, matches(PROJECT, PROJECT_CHARACTERS)] | None = Field(
        None, description="Project (W&B, Trackio) or experiment (MLflow); the run's `name` if not set."
    )
    python: PlainPath | None = Field(
        None,
        description="Path of an existing interpreter that has the trackers' packages, or `current` for the one that"
        " runs hyperpod-ft. If not set, the `env` stage creates a virtual environment for each tracker below"
        " `cluster.root`.",
    )
