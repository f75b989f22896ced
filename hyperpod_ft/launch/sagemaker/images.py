"""AWS's container images of training jobs: engine, device and region -> URI.

Tags: AWS's Deep Learning Containers (docs/src/data) and AWS Neuron's containers, read in August 2026. SageMaker's own
SDK lists no newer image for Neuron than torch 1.11.
"""

from hyperpod_ft.aws.ecr_images import image_uri
from hyperpod_ft.config.instances import CATALOGUE
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError

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
    section = config.sagemaker
    assert section is not None, "only for runs with a section sagemaker"
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
    uri = image_uri(section.region, tag)
    if uri is None:
        raise UserError(f"sagemaker.region: the account of AWS's images is not known for {section.region}", _OWN)
    return uri
