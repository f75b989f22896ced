"""What is requested from SageMaker for an endpoint: a model, a configuration, the endpoint. Pure.

Names of model and configuration end with a digest of request and files. So a name stands for one content, and what an
interrupted command has already created can be used.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from hyperpod_ft.config.instances import ENDPOINT_INSTANCES
from hyperpod_ft.config.sections.sagemaker import Deploy
from hyperpod_ft.digests import text_sha256
from hyperpod_ft.launch.finished import BASE, TUNED
from hyperpod_ft.planning.lora import max_lora_rank
from hyperpod_ft.sagemaker.endpoint.bundle import ADAPTER_DIRECTORY, CODE, Bundle
from hyperpod_ft.sagemaker.endpoint.fit import MEMORY_SHARE, ServingFit
from hyperpod_ft.sagemaker.images import IMAGES, image_uri
from hyperpod_ft.sagemaker.section import RUN_TAG

MODEL_DIRECTORY = "/opt/ml/model"  # where SageMaker puts the bundle
VARIANT = "AllTraffic"
_DOWNLOAD_SECONDS = 3600  # the most that SageMaker allows
_STARTUP_MINUTES = {"vllm": 20, "lmi": 20, "neuron": 60, "kit": 20}
_DIGITS = 8  # of a digest in a name
_MAX_VOLUME_GB = 512


@dataclass(frozen=True)
class Target:
    """What is deployed where. `url`: the S3 prefix of the bundle's files, without a slash at its end."""

    name: str  # of the endpoint
    run: str  # name/id
    region: str
    role: str
    bundle: Bundle
    url: str
    settings: Deploy
    fit: ServingFit


@dataclass(frozen=True)
class Requests:
    """The requests, in the order in which they are sent. `component` is None unless the endpoint scales to zero."""

    model: dict[str, Any]
    config: dict[str, Any]
    endpoint: dict[str, Any]
    component: dict[str, Any] | None = None

    def in_order(self) -> list[tuple[str, dict[str, Any]]]:
        """Operations of SageMaker and their requests."""
        found = [("CreateModel", self.model), ("CreateEndpointConfig", self.config), ("CreateEndpoint", self.endpoint)]
        return found if self.component is None else [*found, ("CreateInferenceComponent", self.component)]


def requests(target: Target) -> Requests:
    """The requests for a target. Raises UserError when no image is known in its region."""
    tags = [{"Key": RUN_TAG, "Value": target.run}]
    model = _named(
        "ModelName",
        target.name,
        {
            "PrimaryContainer": {
                "Image": target.settings.image or image_uri(target.settings.container_kind, target.region),
                "ModelDataSource": {
                    "S3DataSource": {
                        "S3Uri": f"{target.url}/",
                        "S3DataType": "S3Prefix",
                        "CompressionType": "None",
                    }
                },
                "Environment": environment(target),
            },
            "ExecutionRoleArn": target.role,
            "Tags": tags,
        },
        target.bundle.version,
    )
    config = _named(
        "EndpointConfigName",
        target.name,
        {"ProductionVariants": [_variant(target, model["ModelName"])], "Tags": tags}
        | ({"ExecutionRoleArn": target.role} if target.settings.scale_to_zero else {}),
        model["ModelName"],  # which only the component of one that scales to zero has in its request
    )
    endpoint = {"EndpointName": target.name, "EndpointConfigName": config["EndpointConfigName"], "Tags": tags}
    component = _component(target, model["ModelName"], tags) if target.settings.scale_to_zero else None
    return Requests(model, config, endpoint, component)


def environment(target: Target) -> dict[str, str]:
    """The container's variables; each of these images turns them into arguments of its server.

    AWS's vLLM image: `SM_VLLM_X` is --x; LMI: `OPTION_X` is option.x; Hugging Face's: `SM_ON_X` is --x. LMI can run a
    handler in Python instead of vLLM: the kit's.
    """
    settings, length = target.settings, str(target.fit.max_length)
    degree, concurrency = str(target.fit.tensor_parallel), str(settings.max_concurrency)
    if settings.container_kind == "neuron":
        return {
            "SM_ON_MODEL": MODEL_DIRECTORY,
            "SM_ON_BATCH_SIZE": concurrency,
            "SM_ON_SEQUENCE_LENGTH": length,
            "SM_ON_TENSOR_PARALLEL_SIZE": degree,
            "SM_ON_ALLOW_NON_CACHED_MODEL": "",  # compiles at the start instead of asking the Hub for a compiled model
        }
    if settings.container_kind == "kit":
        return {
            "OPTION_ENGINE": "Python",
            "OPTION_ENTRYPOINT": "hyperpod_ft.serving.djl",
            "OPTION_ROLLING_BATCH": "disable",  # else LMI starts vLLM
            "OPTION_TENSOR_PARALLEL_DEGREE": "1",  # on each GPU, a process with the whole model
            "OPTION_MODEL_LOADING_TIMEOUT": str(startup_seconds(settings)),
            "OPTION_PREDICT_TIMEOUT": "120",  # then DJL kills the process, which itself gives up sooner
            "HYPERPOD_FT_MAX_LENGTH": length,
            "PYTHONPATH": f"{MODEL_DIRECTORY}/{CODE}",
            "HF_HUB_OFFLINE": "1",
        }
    if settings.container_kind == "lmi":
        return {
            "HF_MODEL_ID": MODEL_DIRECTORY,
            "HF_HUB_OFFLINE": "1",
            "OPTION_DTYPE": target.bundle.dtype,  # LMI's own default is fp16
            "OPTION_TENSOR_PARALLEL_DEGREE": degree,
            "OPTION_MAX_MODEL_LEN": length,
            "OPTION_MAX_ROLLING_BATCH_SIZE": concurrency,
            "OPTION_GPU_MEMORY_UTILIZATION": f"{MEMORY_SHARE:g}",
            "OPTION_MODEL_LOADING_TIMEOUT": str(startup_seconds(settings)),
            **_answer_options("OPTION_", target),
        }
    made = {
        "SM_VLLM_MODEL": MODEL_DIRECTORY,
        "SM_VLLM_SERVED_MODEL_NAME": TUNED if target.bundle.lora_rank is None else BASE,
        "SM_VLLM_DTYPE": target.bundle.dtype,
        "SM_VLLM_TENSOR_PARALLEL_SIZE": degree,
        "SM_VLLM_MAX_MODEL_LEN": length,
        "SM_VLLM_MAX_NUM_SEQS": concurrency,
        "SM_VLLM_GPU_MEMORY_UTILIZATION": f"{MEMORY_SHARE:g}",
        "HF_HUB_OFFLINE": "1",
        "STANDARD_AUTO_INSTALL_REQ": "false",  # never install a requirements.txt that a bundle might hold
        **_answer_options("SM_VLLM_", target),
    }
    if target.bundle.lora_rank is None:
        return made
    return made | {
        "SM_VLLM_ENABLE_LORA": "true",
        "SM_VLLM_MAX_LORA_RANK": str(max_lora_rank(target.bundle.lora_rank)),
        "SM_VLLM_LORA_MODULES": f"{TUNED}={MODEL_DIRECTORY}/{ADAPTER_DIRECTORY}",
    }


def _answer_options(prefix: str, target: Target) -> dict[str, str]:
    """What makes the server read tool calls and reasoning in the answers."""
    options = target.bundle.answers.vllm_options
    return {prefix + option.upper().replace("-", "_"): value for option, value in options.items()}


def model_name(settings: Deploy) -> str | None:
    """The name of the tuned model in requests; None where the server has one model, which it names itself."""
    return TUNED if settings.container_kind == "vllm" else None


def startup_seconds(settings: Deploy) -> int:
    return 60 * (settings.startup_minutes or _STARTUP_MINUTES[settings.container_kind])


def component_name(endpoint: str) -> str:
    """The inference component of an endpoint that scales to zero."""
    return f"{endpoint}-model"


def _variant(target: Target, model: str) -> dict[str, Any]:
    settings = target.settings
    made: dict[str, Any] = {
        "VariantName": VARIANT,
        "InstanceType": f"ml.{settings.instance_type}",
        "InitialInstanceCount": 1 if settings.scale_to_zero else settings.instances,
        "InferenceAmiVersion": IMAGES[settings.container_kind].ami,
        "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
    }
    if not ENDPOINT_INSTANCES[settings.instance_type].nvme:
        # the model, what is compiled from it, and 64 GB for the image
        made["VolumeSizeInGB"] = min(_MAX_VOLUME_GB, 64 + math.ceil(3 * target.bundle.nbytes / 1e9))
    if not settings.scale_to_zero:
        return made | {"ModelName": model, **_patience(settings)}
    return made | {
        "ManagedInstanceScaling": {
            "Status": "ENABLED",
            "MinInstanceCount": 0,
            "MaxInstanceCount": settings.instances,
        }
    }


def _component(target: Target, model: str, tags: list[dict[str, str]]) -> dict[str, Any]:
    """The model as an inference component, which takes a whole instance: only endpoints made of these reach zero."""
    return {
        "InferenceComponentName": component_name(target.name),
        "EndpointName": target.name,
        "VariantName": VARIANT,
        "Specification": {
            "ModelName": model,
            "StartupParameters": _patience(target.settings),
            "ComputeResourceRequirements": {
                "NumberOfAcceleratorDevicesRequired": target.fit.instance.devices,
                "MinMemoryRequiredInMb": 1024,
            },
        },
        "RuntimeConfig": {"CopyCount": 1},
        "Tags": tags,
    }


def _patience(settings: Deploy) -> dict[str, Any]:
    return {
        "ModelDataDownloadTimeoutInSeconds": _DOWNLOAD_SECONDS,
        "ContainerStartupHealthCheckTimeoutInSeconds": startup_seconds(settings),
    }


def _named(key: str, endpoint: str, request: dict[str, Any], more: str) -> dict[str, Any]:
    """`request` under the endpoint's name and the digest of `more` and all but its tags."""
    content = {name: value for name, value in request.items() if name != "Tags"} | {"": more}
    return {key: f"{endpoint}-{text_sha256(json.dumps(content, sort_keys=True))[:_DIGITS]}", **request}
