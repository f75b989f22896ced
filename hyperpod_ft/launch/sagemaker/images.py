"""AWS's container images of training jobs: engine, device and region -> URI.

Accounts and tags: AWS's Deep Learning Containers (docs/reference/region_availability.md, docs/src/data) and AWS
Neuron's containers, read in August 2026. SageMaker's own SDK lists no newer image for Neuron than torch 1.11.
"""

from hyperpod_ft.config.instances import CATALOGUE
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError

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
# repository and tag, by engine and device; engine neuron needs its own environment on CPUs too
_TAGS = {
    ("torch", "cuda"): "pytorch:2.13-cu133-amzn2023-sagemaker",
    ("torch", "cpu"): "pytorch:2.13-cpu-amzn2023-sagemaker",
    **dict.fromkeys(
        (("neuron", "neuron"), ("neuron", "cpu")),
        "pytorch-training-neuronx:2.8.0-neuronx-py311-sdk2.26.1-ubuntu22.04",
    ),
}
_OWN = "set sagemaker.image to the URI of an image"


def image(config: RunConfig, instance_type: str) -> str:
    """The image of a job of this run on an instance type: the run file's, or else AWS's.

    Raises UserError where AWS has none.
    """
    section = config.sagemaker
    assert section is not None, "only for runs with a section sagemaker"
    if section.image:
        return section.image
    known = CATALOGUE.get(instance_type)
    device = known.device if known else "cpu"
    tag = _TAGS.get((config.engine, device))
    if tag is None:
        raise UserError(f"sagemaker.image: AWS has none to train with engine {config.engine} on {instance_type}", _OWN)
    if section.region not in ACCOUNTS:
        raise UserError(f"sagemaker.region: no account with AWS's images is known in {section.region}", _OWN)
    suffix = "amazonaws.com.cn" if section.region.startswith("cn-") else "amazonaws.com"
    return f"{ACCOUNTS[section.region]}.dkr.ecr.{section.region}.{suffix}/{tag}"
