"""AWS's container images of training jobs and endpoints: what is to run, and the region -> URI. Pure.

Accounts: AWS's Deep Learning Containers (docs/reference/region_availability.md), read in August 2026. Tags of training
jobs: the same (docs/src/data) and AWS Neuron's containers, August 2026; SageMaker's own SDK lists no newer image for
Neuron than torch 1.11. Tags of endpoints: the newest in the same documentation and in Hugging Face's table of Neuron
images, August to November 2026. None was started by the kit on AWS.
"""

from dataclasses import dataclass

from hyperpod_ft.aws.checks.service_model import dns_suffix
from hyperpod_ft.config.instances import CATALOGUE
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sections.sagemaker import Container
from hyperpod_ft.errors import UserError
from hyperpod_ft.sagemaker.section import sagemaker_section

_MAIN_ACCOUNT = "763104351884"
_MAIN_REGIONS = (
    *("us-east-1", "us-east-2", "us-west-1", "us-west-2", "ca-central-1", "sa-east-1"),
    *("eu-west-1", "eu-west-2", "eu-west-3", "eu-central-1", "eu-north-1"),
    *("ap-south-1", "ap-southeast-1", "ap-southeast-2", "ap-northeast-1", "ap-northeast-2"),
)
ACCOUNTS = {
    **dict.fromkeys(_MAIN_REGIONS, _MAIN_ACCOUNT),
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


def _registry_uri(region: str, repository_and_tag: str) -> str | None:
    """The URI of an image in the region's registry; None where no account with AWS's images is known."""
    account = ACCOUNTS.get(region)
    return f"{account}.dkr.ecr.{region}.{dns_suffix(region)}/{repository_and_tag}" if account else None


# repository and tag, by engine and device; engine neuron needs its own environment on CPUs too
_TAGS = {
    ("torch", "cuda"): "pytorch:2.13-cu133-amzn2023-sagemaker",
    ("torch", "cpu"): "pytorch:2.13-cpu-amzn2023-sagemaker",
    **dict.fromkeys(
        (("neuron", "neuron"), ("neuron", "cpu")),
        "pytorch-training-neuronx:2.8.0-neuronx-py311-sdk2.26.1-ubuntu22.04",
    ),
}
_NEURON_SDK = "2.26.1"  # of that image
_OWN = "set sagemaker.image to the URI of an image"


def image(config: RunConfig, instance_type: str) -> str:
    """The image of a job of this run on an instance type: the run file's, or else AWS's.

    Raises UserError where AWS publishes none.
    """
    section = sagemaker_section(config)
    if section.image:
        return section.image
    known = CATALOGUE.get(instance_type)
    device = known.device if known else "cpu"
    tag = _TAGS.get((config.engine, device))
    if tag is None:
        raise UserError(
            f"sagemaker.image: AWS publishes no training image for engine {config.engine} on {instance_type}", _OWN
        )
    if config.engine == "neuron" and config.env.sdk != _NEURON_SDK:
        # the pins of another would lie above this one's runtime and compiler
        raise UserError(
            f"sagemaker.image: AWS's image has Neuron SDK {_NEURON_SDK}, and env.sdk is {config.env.sdk}", _OWN
        )
    uri = _registry_uri(section.region, tag)
    if uri is None:
        raise UserError(f"sagemaker.region: the account of AWS's images is not known for {section.region}", _OWN)
    return uri


_NEURON_REGIONS = frozenset(
    {
        *("us-east-1", "us-east-2", "us-west-2", "eu-central-1", "eu-west-1", "eu-west-3"),
        *("ap-northeast-1", "ap-south-1", "ap-southeast-1", "ap-southeast-2", "sa-east-1"),
    }
)


@dataclass(frozen=True)
class Image:
    """The image of an endpoint's container. `ami`: SageMaker's InferenceAmiVersion, whose driver the image needs."""

    repository: str
    tag: str
    ami: str


_LMI = Image("djl-inference", "0.38.0-lmi29.0.0-cu130", "al2023-ami-sagemaker-inference-gpu-4-1")
IMAGES: dict[Container, Image] = {
    # SageMaker's default AMI has no driver for CUDA 13
    "vllm": Image("vllm", "server-sagemaker-cuda-v2.6", "al2023-ami-sagemaker-inference-gpu-4-1"),
    "lmi": _LMI,
    "kit": _LMI,
    "neuron": Image(
        "huggingface-vllm-inference-neuronx",
        "0.11.0-optimum0.4.5-neuronx-py310-sdk2.26.1-ubuntu22.04",
        "al2-ami-sagemaker-inference-neuron-2",
    ),
}


def image_uri(container: Container, region: str) -> str:
    """The URI of a container's image in a region's registry. Raises UserError for a region that has none."""
    image = IMAGES[container]
    uri = _registry_uri(region, f"{image.repository}:{image.tag}")
    if uri is None or (container == "neuron" and region not in _NEURON_REGIONS):
        raise UserError(
            f"deploy.region: no image of container {container} is known in {region}",
            "set deploy.image to the URI of a copy in your own registry, or choose another region",
        )
    return uri
