"""Where the jobs run: section `cluster`."""

import re
from typing import Annotated

from pydantic import Field, field_validator

from hyperpod_ft.config.fields import (
    NonNegativeInt,
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
from hyperpod_ft.config.instances import CATALOGUE, names
from hyperpod_ft.config.secrets import SECRET_NAME, holds_secret

_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# The job scripts set these.
_RESERVED_NAMES = re.compile(
    r"RUN_DIR|PATH|PYTHON.*|BASH_.*|HYPERPOD_FT_.*|SLURM_.*|SBATCH_.*|MASTER_(ADDR|PORT)|python|TMPDIR|OMP_NUM_THREADS"
    r"|(HF_HUB|TRANSFORMERS)_OFFLINE|TORCHELASTIC_.*"
)


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
        description="Additional environment variables of every job. Not for secrets: jobs inherit those from the shell"
        " that submits.",
    )

    @field_validator("instance_type")
    @classmethod
    def _known_instance(cls, value: str) -> str:
        name = value.removeprefix("ml.")
        if name not in CATALOGUE:
            raise ValueError(f"unknown instance type; known: {', '.join(names())}")
        return name

    @field_validator("environment")
    @classmethod
    def _plain_environment(cls, value: dict[str, str]) -> dict[str, str]:
        for name, content in value.items():
            if not _ENVIRONMENT_NAME.fullmatch(name):
                raise ValueError(f"{shown(name)} is not a valid name of an environment variable")
            if _RESERVED_NAMES.fullmatch(name):
                raise ValueError(f"{shortened(name)} is set by the job scripts; remove it")
            if SECRET_NAME.search(name) or holds_secret(content):
                raise ValueError(f"{shortened(name)} looks like a secret; export it in the shell that submits instead")
            no_control_characters(content)
        return value
