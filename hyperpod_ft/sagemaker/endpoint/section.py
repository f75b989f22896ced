"""Section `deploy` of a run file: the endpoint of `hyperpod-ft deploy`. It is not part of the run's identity."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator, model_validator

from hyperpod_ft.aws.fields import Region, RoleArn
from hyperpod_ft.config.fields import PositiveInt, Section, matches
from hyperpod_ft.errors import did_you_mean
from hyperpod_ft.planning.lora import MAX_LORA_RANK
from hyperpod_ft.sagemaker.endpoint.instances import ENDPOINT_INSTANCES, families
from hyperpod_ft.sagemaker.section import Container, S3Url

if TYPE_CHECKING:
    from hyperpod_ft.config.run_config import RunConfig


class Deploy(Section):
    """The SageMaker endpoint that `hyperpod-ft deploy` creates for the tuned model. Changes nothing in the run."""

    instance_type: str = Field(
        description="Instance type of the endpoint, such as `g6.2xlarge`; an inf2 or trn1 type with container `neuron`."
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
        description="`vllm` (AWS's vLLM image), `lmi` (AWS's Large Model Inference image), or `neuron` (Hugging Face's"
        " vLLM for inf2 and trn1). If not set: `neuron` on inf2 and trn1, otherwise `vllm`.",
    )
    model: Literal["merged", "adapter"] = Field(
        "merged",
        description="`merged` serves the tuned model alone; `adapter` the base model with the adapter, side by side"
        " (container `vllm`).",
    )
    image: Annotated[str, matches(r"\S{1,255}", "the URI of a container image")] | None = Field(
        None, description="Another image for the same container, as an ECR URI."
    )
    instances: PositiveInt = Field(1, le=100, description="Number of instances; each holds the whole model.")
    scale_to_zero: bool = Field(
        False,
        description="Release all instances after a while without requests; the next request fails and starts one"
        " again, which takes minutes. `instances` is then the maximum.",
    )
    max_length: PositiveInt | None = Field(
        None,
        description="Longest request, in tokens: prompt and answer. If not set: dataset.max_length +"
        " generate.max_new_tokens, at most what the model has positions for.",
    )
    max_concurrency: PositiveInt = Field(8, le=1024, description="Requests that an instance answers at the same time.")
    startup_minutes: PositiveInt | None = Field(
        None,
        le=60,
        description="Minutes in which the container must start to answer. If not set: 20; with container `neuron`,"
        " which compiles first, 60.",
    )

    @field_validator("instance_type")
    @classmethod
    def _known_instance(cls, value: str) -> str:
        name = value.removeprefix("ml.")
        if name not in ENDPOINT_INSTANCES:
            known = ", ".join(f"{family}.*" for family in families())
            raise ValueError(f"unknown endpoint type{did_you_mean(name, ENDPOINT_INSTANCES) or f'; known: {known}'}")
        return name

    @model_validator(mode="after")
    def _settings_go_together(self) -> "Deploy":
        if (self.container_kind == "neuron") != ENDPOINT_INSTANCES[self.instance_type].is_neuron:
            raise ValueError(
                f"container: {self.container_kind} does not run on {self.instance_type}; neuron runs on inf2 and"
                " trn1, vllm and lmi on GPUs"
            )
        if self.model == "adapter" and self.container_kind != "vllm":
            raise ValueError(
                f"model: container {self.container_kind} does not serve adapters; use merged, or container vllm"
            )
        return self

    def check_with(self, config: "RunConfig") -> None:
        """What no endpoint will serve is refused before the training."""
        if config.dataset.max_target_length is not None:
            raise ValueError(
                "deploy: vLLM does not serve encoder-decoders; remove the section, and serve the tuned model with"
                " `hyperpod-ft serve`"
            )
        if self.model == "merged":
            return
        if config.training.method != "lora":
            raise ValueError("deploy.model: training.method full makes no adapter; set it to merged")
        if config.lora.dora:
            raise ValueError("deploy.model: vLLM does not serve DoRA adapters with a base model; set it to merged")
        if config.lora.r > MAX_LORA_RANK:
            raise ValueError(f"deploy.model: vLLM serves adapters of rank {MAX_LORA_RANK} or less; set it to merged")

    @property
    def container_kind(self) -> Container:
        """The container, as set or by the instance type."""
        return self.container or ("neuron" if ENDPOINT_INSTANCES[self.instance_type].is_neuron else "vllm")


def deploy_of(config: "RunConfig") -> Deploy | None:
    """A run file's section `deploy`."""
    found: Deploy | None = getattr(config, "deploy")  # noqa: B009 - as in section_of
    return found
