import json
from dataclasses import replace
from pathlib import Path

import pytest

from hyperpod_ft.aws.checks.service_model import check_request, model
from hyperpod_ft.config.instances import ENDPOINT_INSTANCES
from hyperpod_ft.config.sections.sagemaker import Deploy
from hyperpod_ft.data.text.answer_format import AnswerFormat
from hyperpod_ft.errors import UserError
from hyperpod_ft.sagemaker.endpoint import scaling
from hyperpod_ft.sagemaker.endpoint.bundle import Bundle
from hyperpod_ft.sagemaker.endpoint.endpoint_request import Target, component_name, environment, requests
from hyperpod_ft.sagemaker.endpoint.fit import ServedModel, ServingFit
from hyperpod_ft.sagemaker.images import IMAGES, image_uri
from tests import golden

GOLDEN = Path(__file__).parent / "golden"


def target(lora_rank: int | None = None, **changes: object) -> Target:
    settings = Deploy.model_validate({"instance_type": "g6.12xlarge", **changes})
    return Target(
        name="dolly-0123456789ab",
        run="dolly/0123456789ab",
        region="us-west-2",
        role="arn:aws:iam::123456789012:role/endpoint",
        bundle=Bundle(
            parts=(),
            nbytes=16_060_000_000,
            version="ffffffffffff-123456",
            served=ServedModel(16_060_000_000, None, 32, 8192, "llama"),
            dtype="auto",
            chat=True,
            answers=AnswerFormat(),
            lora_rank=lora_rank,
        ),
        url="s3://models/kit/endpoints/dolly-0123456789ab/ffffffffffff-123456",
        settings=settings,
        fit=ServingFit(ENDPOINT_INSTANCES[settings.instance_type], 4, 4096, 3.74, 0.25),
    )


def with_bundle(case: Target, **changes: object) -> Target:
    return replace(case, bundle=replace(case.bundle, **changes))


CASES = {
    "vllm": target(),
    "adapter": target(16, model="adapter"),
    "lmi": target(container="lmi", instances=2),
    "neuron": target(instance_type="inf2.48xlarge"),
    "kit": target(container="kit"),
    "scale-to-zero": target(scale_to_zero=True, instances=3),
}


def recorded(case: str) -> str:
    made = requests(CASES[case]).in_order()
    for operation, request in made:
        assert check_request("sagemaker", operation, request) == []
    return json.dumps(dict(made), indent=2) + "\n"


def test_requests_are_as_recorded_and_as_aws_accepts_them() -> None:
    base = recorded("vllm")
    golden.check(GOLDEN / "vllm.json", base)
    for case in sorted(set(CASES) - {"vllm"}):
        golden.check(GOLDEN / f"{case}.diff", golden.difference(base, recorded(case)))


@pytest.mark.parametrize(("container", "prefix"), [("vllm", "SM_VLLM_"), ("lmi", "OPTION_")])
def test_a_model_that_calls_tools_has_its_answers_read_so(container: str, prefix: str) -> None:
    plain = target(container=container)
    calling = environment(with_bundle(plain, answers=AnswerFormat("hermes", reasoning=True)))
    assert dict(calling.items() - environment(plain).items()) == {
        f"{prefix}ENABLE_AUTO_TOOL_CHOICE": "true",
        f"{prefix}TOOL_CALL_PARSER": "hermes",
        f"{prefix}REASONING_PARSER": "qwen3",
    }


def test_a_name_stands_for_the_content_of_its_request() -> None:
    one, same, other = (requests(case) for case in (target(), target(), target(max_concurrency=9)))
    assert one == same
    assert one.model["ModelName"] != other.model["ModelName"]
    for case in (target(), CASES["scale-to-zero"]):
        first, again = requests(case), requests(with_bundle(case, version="ffffffffffff-654321"))
        assert first.model["ModelName"] != again.model["ModelName"]
        assert first.config["EndpointConfigName"] != again.config["EndpointConfigName"]
    assert one.config["EndpointConfigName"] != other.config["EndpointConfigName"]
    assert one.endpoint["EndpointName"] == other.endpoint["EndpointName"]


def test_names_have_at_most_63_characters() -> None:
    made = requests(replace(target(scale_to_zero=True), name="a" * 54))
    for operation, request in made.in_order():
        assert check_request("sagemaker", operation, request) == []


def test_an_adapter_rank_becomes_one_that_vllm_allows() -> None:
    variables = requests(target(24, model="adapter")).model["PrimaryContainer"]["Environment"]
    assert variables["SM_VLLM_MAX_LORA_RANK"] == "32"


def test_amis_are_sagemakers() -> None:
    known = model("sagemaker").shape_for("ProductionVariantInferenceAmiVersion").enum
    assert {image.ami for image in IMAGES.values()} <= set(known)


def test_instance_types_are_sagemakers() -> None:
    known = model("sagemaker").shape_for("ProductionVariantInstanceType").enum
    assert {f"ml.{name}" for name in ENDPOINT_INSTANCES} <= set(known)


def test_images_are_in_the_registry_of_the_region() -> None:
    assert image_uri("vllm", "us-west-2").startswith("763104351884.dkr.ecr.us-west-2.amazonaws.com/vllm:")
    assert image_uri("lmi", "cn-north-1").startswith("727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn/djl-inference:")
    with pytest.raises(UserError, match=r"deploy\.region.*neuron.*us-west-1"):
        image_uri("neuron", "us-west-1")


def test_scaling_requests_are_what_aws_accepts() -> None:
    name = component_name("dolly-0123456789ab")
    for operation, request in (
        ("RegisterScalableTarget", scaling.target(name, 3)),
        ("PutScalingPolicy", scaling.tracking_policy(name)),
        ("PutScalingPolicy", scaling.step_policy(name)),
    ):
        assert check_request("application-autoscaling", operation, request) == []
    assert check_request("cloudwatch", "PutMetricAlarm", scaling.alarm(name, "arn:aws:autoscaling:policy")) == []
