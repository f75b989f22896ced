"""The container images of endpoints, by region, and how each is configured. Pure.

Accounts: AWS's "Region availability" of the Deep Learning Containers. Tags: the newest in their documentation and in
Hugging Face's table of Neuron images, August to November 2026. None was started by the kit on AWS.
"""

from dataclasses import dataclass
from typing import Literal

from hyperpod_ft.errors import UserError

Server = Literal["vllm", "lmi", "neuron"]

_USUAL = "763104351884"
_USUAL_REGIONS = (
    *("us-east-1", "us-east-2", "us-west-1", "us-west-2", "ca-central-1", "sa-east-1", "eu-west-1", "eu-west-2"),
    *("eu-west-3", "eu-central-1", "eu-north-1", "ap-south-1", "ap-southeast-1", "ap-southeast-2", "ap-northeast-1"),
    "ap-northeast-2",
)
ACCOUNTS: dict[str, str] = {
    **dict.fromkeys(_USUAL_REGIONS, _USUAL),
    "af-south-1": "626614931356",
    "ap-east-1": "871362719292",
    "ap-east-2": "975050140332",
    "ap-northeast-3": "364406365360",
    "ap-south-2": "772153158452",
    "ap-southeast-3": "907027046896",
    "ap-southeast-4": "457447274322",
    "ap-southeast-5": "550225433462",
    "ap-southeast-6": "633930458069",
    "ap-southeast-7": "590183813437",
    "ca-west-1": "204538143572",
    "cn-north-1": "727897471807",
    "cn-northwest-1": "727897471807",
    "eu-central-2": "380420809688",
    "eu-south-1": "692866216735",
    "eu-south-2": "503227376785",
    "il-central-1": "780543022126",
    "me-central-1": "914824155844",
    "me-south-1": "217643126080",
    "mx-central-1": "637423239942",
    "us-gov-east-1": "446045086412",
    "us-gov-west-1": "442386744353",
}
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


IMAGES: dict[Server, Image] = {
    # SageMaker's default AMI has no driver for CUDA 13
    "vllm": Image("vllm", "server-sagemaker-cuda-v2.6", "al2023-ami-sagemaker-inference-gpu-4-1"),
    "lmi": Image("djl-inference", "0.38.0-lmi29.0.0-cu130", "al2023-ami-sagemaker-inference-gpu-4-1"),
    "neuron": Image(
        "huggingface-vllm-inference-neuronx",
        "0.11.0-optimum0.4.5-neuronx-py310-sdk2.26.1-ubuntu22.04",
        "al2-ami-sagemaker-inference-neuron-2",
    ),
}


def image_uri(server: Server, region: str) -> str:
    """The URI of a server's image in a region's registry. Raises UserError for a region that has none."""
    account = ACCOUNTS.get(region)
    if account is None or (server == "neuron" and region not in _NEURON_REGIONS):
        raise UserError(
            f"deploy.region: no image of container {server} is known in {region}",
            "set deploy.image to the URI of a copy in your own registry, or choose another region",
        )
    suffix = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    image = IMAGES[server]
    return f"{account}.dkr.ecr.{region}.{suffix}/{image.repository}:{image.tag}"
