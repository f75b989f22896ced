"""Sections `sagemaker` and `deploy`: where SageMaker training jobs find a run and run it, and the model's endpoint."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from hyperpod_ft.config.fields import (
    FileSystemId,
    NonNegativeInt,
    PositiveInt,
    Region,
    RoleArn,
    Section,
    SecurityGroup,
    Subnet,
    TimeLimit,
    TrainingPlanArn,
    matches,
)
from hyperpod_ft.config.instances import ENDPOINT_INSTANCES, endpoint_families
from hyperpod_ft.errors import did_you_mean

_S3_URL = r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9!_.*'()@=+,-]+)*/?"
_INSTANCE_TYPE = re.compile(r"[a-z0-9-]+\.[a-z0-9]+")


def _without_ml(value: str) -> str:
    name = value.removeprefix("ml.")
    if not _INSTANCE_TYPE.fullmatch(name):
        raise ValueError("must be an instance type such as c7i.4xlarge")
    return name


InstanceType = Annotated[str, AfterValidator(_without_ml)]
S3Url = Annotated[str, matches(_S3_URL, "s3://bucket or s3://bucket/prefix")]
Container = Literal["vllm", "lmi", "neuron", "kit"]  # of an endpoint
MAX_LORA_RANK = 512  # of adapters that vLLM serves


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
        Field(
            None,
            description="Container image of every job. If not set, AWS's, where it exists (docs/training-jobs.md).",
        )
    )
    cpu_instance_type: InstanceType = Field(
        "c7i.4xlarge", description="Instance type of the jobs that use only CPUs, before and after training."
    )
    other_instance_types: Annotated[tuple[InstanceType, ...], Field(max_length=4)] = Field(
        (),
        description="Types for training without capacity for `cluster.instance_type`, the best first: as many devices,"
        " of at least its memory.",
    )
    volume_gb: Annotated[PositiveInt, Field(le=16384)] = Field(
        500, description="Size of each instance's volume, in GB. Types with NVMe disks use these instead."
    )
    spot: bool = Field(
        False,
        description="Train on spot instances, which AWS may take back. Training then resumes.",
    )
    max_wait: TimeLimit = Field(
        "1-00:00:00",
        description="How long training may wait for accelerator instances (with `spot`, for any), as Slurm writes it.",
    )
    keep_alive: Annotated[NonNegativeInt, Field(le=360)] = Field(
        0,
        description="Minutes that the training's instances wait, at full price, for another training (a warm pool)."
        " Not with `spot`.",
    )
    training_plan: TrainingPlanArn | None = Field(
        None, description="Training plan that reserves the instances of the training."
    )
    remote_debug: bool = Field(False, description="Allow a shell in the containers; `submit` prints the command.")
    output: S3Url | None = Field(
        None,
        description="S3 prefix that CreateTrainingJob requires, although nothing is written there. With file_system,"
        " `sagemaker setup --file-system` prints one. If not set: the store.",
    )

    @field_validator("store", "output")
    @classmethod
    def _without_a_slash(cls, value: str | None) -> str | None:
        return value.rstrip("/") if value else value

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
        if self.other_instance_types and (self.spot or self.training_plan or self.keep_alive):
            raise ValueError("other_instance_types: not with spot, training_plan or keep_alive; leave one of them out")
        return self

    @property
    def output_path(self) -> str:
        """The S3 prefix that a request names as its output path."""
        found = self.output or self.store
        assert found is not None, "one of them is set"
        return found


class Deploy(Section):
    """The SageMaker endpoint that `hyperpod-ft deploy` creates for the tuned model. Changes nothing in the run."""

    instance_type: str = Field(
        description="Instance type of the endpoint, such as `g6.2xlarge`. Container `neuron` needs an inf2 or trn1"
        " type."
    )
    store: S3Url | None = Field(
        None,
        description="Where the model is uploaded: `s3://bucket/prefix` in the endpoint's region. If not set:"
        " sagemaker.store.",
    )
    role: RoleArn | None = Field(
        None,
        description="Execution role: reads `store`, pulls the image, writes logs. If not set: sagemaker.role.",
    )
    region: Region | None = Field(
        None, description="AWS region. If not set: sagemaker.region, or that of the AWS configuration."
    )
    container: Container | None = Field(
        None,
        description="Server: `vllm`, `lmi`, `neuron` or `kit` (docs/endpoints.md#before). If not set: `neuron` on inf2"
        " and trn1, otherwise `vllm`.",
    )
    model: Literal["merged", "adapter"] = Field(
        "merged",
        description="`merged` serves the tuned model alone. `adapter` serves the base model and the adapter, side by"
        " side (container `vllm`).",
    )
    image: Annotated[str, matches(r"\S{1,255}", "the URI of a container image")] | None = Field(
        None, description="Another image for the same container, as an ECR URI."
    )
    instances: PositiveInt = Field(1, le=100, description="Number of instances; each holds the whole model.")
    scale_to_zero: bool = Field(
        False,
        description="Release all instances after a while without requests. The next request fails, and starts one"
        " again, which takes minutes. `instances` is then the maximum.",
    )
    max_length: PositiveInt | None = Field(
        None,
        description="Longest request, in tokens: prompt and answer. If not set: dataset.max_length +"
        " generate.max_new_tokens, at most what the model has positions for.",
    )
    max_concurrency: PositiveInt = Field(
        8, le=1024, description="Requests that an instance answers at the same time; `kit`: one for each GPU."
    )
    startup_minutes: PositiveInt | None = Field(
        None,
        le=60,
        description="Minutes until the container must answer. If not set: 20, or 60 with container `neuron`, which"
        " compiles first.",
    )

    @field_validator("instance_type")
    @classmethod
    def _known_instance(cls, value: str) -> str:
        name = value.removeprefix("ml.")
        if name not in ENDPOINT_INSTANCES:
            known = ", ".join(f"{family}.*" for family in endpoint_families())
            raise ValueError(f"unknown endpoint type{did_you_mean(name, ENDPOINT_INSTANCES) or f'; known: {known}'}")
        return name

    @model_validator(mode="after")
    def _settings_go_together(self) -> "Deploy":
        if (self.container_kind == "neuron") != ENDPOINT_INSTANCES[self.instance_type].is_neuron:
            raise ValueError(
                f"container: {self.container_kind} does not run on {self.instance_type}; neuron runs on inf2 and"
                " trn1, the others on GPUs"
            )
        if self.model == "adapter" and self.container_kind != "vllm":
            raise ValueError(
                f"model: container {self.container_kind} does not serve adapters; use merged, or container vllm"
            )
        return self

    @property
    def container_kind(self) -> Container:
        """The container, as set or by the instance type."""
        return self.container or ("neuron" if ENDPOINT_INSTANCES[self.instance_type].is_neuron else "vllm")
