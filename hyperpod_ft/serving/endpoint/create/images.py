"""The container images of endpoints, by region, and how each is configured. Pure.

Tags: the newest in the documentation of AWS's Deep Learning Containers and in Hugging Face's table of Neuron images,
August to November 2026. None was started by the kit on AWS.
"""

from dataclasses import dataclass

from hyperpod_ft.aws import ecr_images
from hyperpod_ft.config.sections.deploy import Container
from hyperpod_ft.errors import UserError

_NEURON_REGIONS = frozenset(
    {
        *("us-east-1", "us-east-2", "us-west-2", "eu-central-1", "eu-west-1", "eu-west-3"),
        *("ap-northeast-1", "ap-south-1", "ap-southeast-1", "ap-southeast-2", "sa-east-1"),
    }
)


@dataclass(frozen=True)
class Image:
    """`ami`: SageMaker's InferenceAmiVersion, whose driver the image needs."""

    repository: str
    tag: str
    ami: str


IMAGES: dict[Container, Image] = {
    # SageMaker's default AMI has no driver for CUDA 13
    "vllm": Image("vllm", "server-sagemaker-cuda-v2.6", "al2023-ami-sagemaker-inference-gpu-4-1"),
    "lmi": Image("djl-inference", "0.38.0-lmi29.0.0-cu130", "al2023-ami-sagemaker-inference-gpu-4-1"),
    "neuron": Image(
        "huggingface-vllm-inference-neuronx",
        "0.11.0-optimum0.4.5-neuronx-py310-sdk2.26.1-ubuntu22.04",
        "al2-ami-sagemaker-inference-neuron-2",
    ),
}


def image_uri(container: Container, region: str) -> str:
    """The URI of a container's image in a region's registry. Raises UserError for a region that has none."""
    image = IMAGES[container]
    uri = ecr_images.image_uri(region, f"{image.repository}:{image.tag}")
    if uri is None or (container == "neuron" and region not in _NEURON_REGIONS):
        raise UserError(
            f"deploy.region: no image of container {container} is known in {region}",
            "set deploy.image to the URI of a copy in your own registry, or choose another region",
        )
    return uri
