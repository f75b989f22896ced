"""Section `sagemaker` of a run file: where SageMaker training jobs find a run, and what they run on."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator, model_validator

from hyperpod_ft.aws.fields import FileSystemId, Region, RoleArn, SecurityGroup, Subnet, TrainingPlanArn
from hyperpod_ft.config.fields import NonNegativeInt, PositiveInt, Section, TimeLimit, matches
from hyperpod_ft.errors import UserError

if TYPE_CHECKING:
    from hyperpod_ft.config.run_config import RunConfig
    from hyperpod_ft.runs.run import Run

_S3_URL = r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9!_.*'()@=+,-]+)*/?"
_INSTANCE_TYPE = re.compile(r"[a-z0-9-]+\.[a-z0-9]+")

SAGEMAKER = "sagemaker"  # the launcher of training jobs
RUN_TAG = "hyperpod-ft:run"  # its value is the run's full name

S3Url = Annotated[str, matches(_S3_URL, "s3://bucket or s3://bucket/prefix")]
Container = Literal["vllm", "lmi", "neuron"]  # of an endpoint


class FileSystem(Section):
    """An FSx for Lustre file system that training jobs mount as `cluster.root`, instead of a store in S3."""

    id: FileSystemId = Field(description="Id of the file system.")
    directory: Annotated[
        str, matches(r"(/[A-Za-z0-9._-]+)+", "an absolute path that begins with the mount name, such as /abcdefgh/ft")
    ] = Field(
        description="Directory of the file system that is `cluster.root`, from its mount name on: `/<mount"
        " name>/hyperpod-ft`."
    )
    subnets: Annotated[tuple[Subnet, ...], Field(min_length=1, max_length=16)] = Field(
        description="Subnets of the jobs, in the file system's zone."
    )
    security_groups: Annotated[tuple[SecurityGroup, ...], Field(min_length=1, max_length=5)] = Field(
        description="Security groups of the jobs. They must reach the file system, and one another with several"
        " instances."
    )


class SageMaker(Section):
    """SageMaker training jobs (`submit --launcher sagemaker`) and endpoints; docs/training-jobs.md."""

    region: Region = Field(description="AWS region of the jobs, the store and the file system.")
    role: RoleArn = Field(description="Execution role of the containers; `hyperpod-ft sagemaker setup` creates one.")
    store: S3Url | None = Field(
        None,
        description="S3 prefix that holds models, datasets and runs. `cluster.root` is then a directory of the"
        " machine that submits. Set either this or file_system.",
    )
    file_system: FileSystem | None = None
    image: Annotated[str, matches(r"[A-Za-z0-9][A-Za-z0-9./:@_-]{0,254}", "the URI of a container image")] | None = (
        Field(None, description="Container image of every job. If not set, AWS's image for the engine and the device.")
    )
    cpu_instance_type: str = Field(
        "c7i.4xlarge", description="Instance type of the jobs that use only CPUs, before and after training."
    )
    volume_gb: Annotated[PositiveInt, Field(le=16384)] = Field(
        500, description="Size of each instance's volume, in GB. Types with NVMe disks use these instead."
    )
    spot: bool = Field(
        False,
        description="Train on spot instances: cheaper, but AWS may take them back. Training then resumes from its"
        " newest checkpoint.",
    )
    max_wait: TimeLimit = Field(
        "1-00:00:00",
        description="How long training may wait for accelerator instances (with `spot`, for any), as Slurm writes it.",
    )
    keep_alive: Annotated[NonNegativeInt, Field(le=360)] = Field(
        0,
        description="Minutes that the training's instances wait afterwards for another training, such as one that"
        " resumes this one (a warm pool). They cost as much as busy ones. Not with `spot`.",
    )
    training_plan: TrainingPlanArn | None = Field(
        None, description="Training plan that reserves the instances of the training."
    )
    output: S3Url | None = Field(
        None,
        description="S3 prefix that CreateTrainingJob requires as an output path; nothing is written there. Needed"
        " with file_system; `sagemaker setup --file-system` prints one. If not set: the store.",
    )

    @field_validator("store", "output")
    @classmethod
    def _without_a_slash(cls, value: str | None) -> str | None:
        return value.rstrip("/") if value else value

    @field_validator("cpu_instance_type")
    @classmethod
    def _instance_type(cls, value: str) -> str:
        name = value.removeprefix("ml.")
        if not _INSTANCE_TYPE.fullmatch(name):
            raise ValueError("must be an instance type such as c7i.4xlarge")
        return name

    @model_validator(mode="after")
    def _consistent(self) -> "SageMaker":
        if (self.store is None) == (self.file_system is None):
            raise ValueError("set either store or file_system, not both: the run is kept there")
        if self.file_system and not self.output:
            raise ValueError("file_system needs output: set it to an S3 prefix that the role may write")
        if self.spot and self.training_plan:
            raise ValueError("spot and training_plan: the instances of a plan are not spot instances; set one of them")
        if self.spot and self.keep_alive:
            raise ValueError("spot and keep_alive: SageMaker keeps no spot instances in a warm pool; set one of them")
        return self

    def check_with(self, config: "RunConfig") -> None:
        """What training jobs cannot do."""
        if config.eval:
            raise ValueError("eval: SageMaker training jobs do not evaluate; remove section eval or section sagemaker")
        if config.engine == "neuron" and self.store and config.cluster.nodes > 1:
            raise ValueError(
                "sagemaker.store: with engine neuron, several nodes write their checkpoints to one shared volume; set"
                " sagemaker.file_system instead"
            )

    @property
    def output_path(self) -> str:
        """The S3 prefix that a request names as its output path."""
        found = self.output or self.store
        assert found is not None, "one of them is set"
        return found


def section_of(config: "RunConfig") -> SageMaker | None:
    """A run file's section `sagemaker`."""
    found: SageMaker | None = getattr(config, "sagemaker")  # noqa: B009 - an annex's section, unknown to the type checker
    return found


def sagemaker_section(config: "RunConfig") -> SageMaker:
    """The run file's section. Raises UserError without one."""
    section = section_of(config)
    if section is None:
        raise UserError("--launcher sagemaker: the run file has no section sagemaker", "add it (docs/training-jobs.md)")
    return section


def store_of(config: "RunConfig") -> str | None:
    """The S3 prefix in which training jobs keep the run, if they do not mount a file system."""
    section = section_of(config)
    return section.store if section else None


def store_url(run: "Run", path: Path) -> str:
    """Where the run's store has a path below `cluster.root`."""
    return f"{store_of(run.config)}/{run.paths.relative(path)}"


def slug(config: "RunConfig", longest: int) -> str:
    """The run's name in the characters that SageMaker's names may have, cut to `longest`."""
    return re.sub(r"[^A-Za-z0-9]+", "-", config.name).strip("-")[:longest].rstrip("-") or "run"
