"""SageMaker's endpoints: models, configurations, endpoints, inference components, which start real servers.

moto's are in service at once, know no instance type newer than 2022, and run nothing. Here an endpoint is Creating
while its container starts, and Failed when that does not answer /ping in time; requests are in endpoint_runtime.py.
"""

import copy
import secrets
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from tests.aws.clock import Process
from tests.aws.cluster_checks import check_role
from tests.aws.endpoint_container import Container
from tests.aws.wire import AwsError, operation
from tests.aws.world import ACCOUNT, Region

_POLL_SECONDS = 0.2  # between two requests of /ping
_NOT_HEALTHY = (
    "The primary container for production variant {variant} did not pass the ping health check. Please check CloudWatch"
    " logs for this endpoint."
)


class Hosted:
    """What has a container: an endpoint with a model, or an inference component."""

    def __init__(self, region: Region, request: dict[str, Any], tags: list[dict[str, str]]) -> None:
        self.region, self.request, self.tags = region, copy.deepcopy(request), tags
        self.status, self.failure = "Creating", ""
        self.created = datetime.now(timezone.utc)
        self.container: Container | None = None
        self.deleted = False

    def start(self, model: dict[str, Any], log_group: str, variant: str) -> Process:
        """Creating, then InService or Failed. A container that has ended stays down: it is restarted to no avail."""
        yield self.region.seconds("endpoint.create")
        if self.deleted:
            return
        self.container = Container(
            self.region, model["PrimaryContainer"], log_group, f"{variant}/i-{secrets.token_hex(8)}"
        )
        waited = 0.0
        while not self.deleted and not self.container.answers_ping():
            if self.container.ended or waited > self.region.seconds("endpoint.health"):
                self.status, self.failure = "Failed", _NOT_HEALTHY.format(variant=variant)
                self.container.stop()
                return
            waited += _POLL_SECONDS
            yield _POLL_SECONDS
        if not self.deleted:
            self.status = "InService"

    def stop(self) -> None:
        self.deleted = True
        if self.container is not None:
            self.container.stop()


def invalid(message: str) -> AwsError:
    return AwsError("ValidationException", message)


def arn(region: Region, kind: str, name: str) -> str:
    return f"arn:aws:sagemaker:{region.name}:{ACCOUNT}:{kind}/{name.lower()}"


def _require(found: dict[str, Any], region: Region, kind: str, name: str) -> Any:
    if name not in found:
        raise invalid(f'Could not find {kind} "{arn(region, kind, name)}".')
    return found[name]


def _new(found: dict[str, Any], region: Region, kind: str, name: str) -> None:
    if name in found:
        raise invalid(f'Cannot create already existing {kind} "{arn(region, kind, name)}".')


@operation("sagemaker", "CreateModel")
def create_model(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    name = request["ModelName"]
    _new(region.models, region, "model", name)
    container = request.get("PrimaryContainer", {})
    source = container.get("ModelDataSource", {}).get("S3DataSource", {})
    if not source.get("S3Uri", "").endswith("/"):
        raise invalid(f"S3Uri {source.get('S3Uri')!r} of type S3Prefix must end with /")
    if sum(len(key) + len(value) for key, value in container.get("Environment", {}).items()) > 32 << 10:
        raise invalid("Environment has more than 32 KB")
    check_role(region, request["ExecutionRoleArn"])
    region.models[name] = {**copy.deepcopy(request), "CreationTime": datetime.now(timezone.utc)}
    return {"ModelArn": arn(region, "model", name)}


@operation("sagemaker", "CreateEndpointConfig")
def create_endpoint_config(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    name = request["EndpointConfigName"]
    _new(region.endpoint_configs, region, "endpoint-configuration", name)
    for variant in request["ProductionVariants"]:
        if "ModelName" in variant:
            _require(region.models, region, "model", variant["ModelName"])
        elif "ExecutionRoleArn" not in request:
            raise invalid("ExecutionRoleArn is required for endpoints with inference components")
        if "InstanceType" not in variant or "InitialInstanceCount" not in variant:
            raise invalid("InstanceType and InitialInstanceCount are required")
    region.endpoint_configs[name] = {**copy.deepcopy(request), "CreationTime": datetime.now(timezone.utc)}
    return {"EndpointConfigArn": arn(region, "endpoint-config", name)}


@dataclass(frozen=True)
class _Kind:
    """What keeps its request and has no state: `operation` is the end of its operations' names, `key` of ARNs."""

    operation: str
    attribute: str  # of a region
    words: str
    key: str

    def describe(self, region: Region, request: dict[str, Any]) -> dict[str, Any]:
        name = request[f"{self.operation}Name"]
        found = _require(getattr(region, self.attribute), region, self.words, name)
        shown = {key: value for key, value in found.items() if key != "Tags"}
        return {**shown, f"{self.operation}Arn": arn(region, self.key, name)}

    def delete(self, region: Region, request: dict[str, Any]) -> dict[str, Any]:
        name, there = request[f"{self.operation}Name"], getattr(region, self.attribute)
        _require(there, region, self.words, name)
        del there[name]
        return {}

    def list(self, region: Region, request: dict[str, Any]) -> dict[str, Any]:
        part = request.get("NameContains", "")
        found = [name for name in getattr(region, self.attribute) if part in name]
        return {f"{self.operation}s": [self.describe(region, {f"{self.operation}Name": name}) for name in found]}


for _kind in (
    _Kind("Model", "models", "model", "model"),
    _Kind("EndpointConfig", "endpoint_configs", "endpoint configuration", "endpoint-config"),
):
    operation("sagemaker", f"Describe{_kind.operation}")(_kind.describe)
    operation("sagemaker", f"Delete{_kind.operation}")(_kind.delete)
    operation("sagemaker", f"List{_kind.operation}s")(_kind.list)


@operation("sagemaker", "CreateEndpoint")
def create_endpoint(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    name = request["EndpointName"]
    _new(region.endpoints, region, "endpoint", name)
    config = _require(region.endpoint_configs, region, "endpoint configuration", request["EndpointConfigName"])
    variant = config["ProductionVariants"][0]
    quota = region.world.scenario.quotas.get(f"{variant['InstanceType']} for endpoint usage")
    if quota is not None and quota < variant["InitialInstanceCount"]:
        raise AwsError(
            "ResourceLimitExceeded",
            f"The account-level service limit '{variant['InstanceType']} for endpoint usage' is {quota:.0f} Instances",
        )
    endpoint = Hosted(region, request, request.get("Tags", []))
    region.endpoints[name] = endpoint
    if "ModelName" in variant:
        log_group = f"/aws/sagemaker/Endpoints/{name}"
        region.world.clock.start(endpoint.start(region.models[variant["ModelName"]], log_group, variant["VariantName"]))
    else:
        region.world.clock.start(_empty(endpoint))
    return {"EndpointArn": arn(region, "endpoint", name)}


def _empty(endpoint: Hosted) -> Process:
    """An endpoint without a model of its own starts instances only."""
    yield endpoint.region.seconds("endpoint.create")
    endpoint.status = "InService"


@operation("sagemaker", "DescribeEndpoint")
def describe_endpoint(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    name = request["EndpointName"]
    found: Hosted = _require(region.endpoints, region, "endpoint", name)
    variants = region.endpoint_configs.get(found.request["EndpointConfigName"], {}).get("ProductionVariants", [])
    running = [
        {"VariantName": one["VariantName"], "CurrentInstanceCount": one["InitialInstanceCount"]} for one in variants
    ]
    return {
        "EndpointName": name,
        "EndpointArn": arn(region, "endpoint", name),
        "EndpointConfigName": found.request["EndpointConfigName"],
        "EndpointStatus": found.status,
        "CreationTime": found.created,
        "LastModifiedTime": found.created,
        "FailureReason": found.failure or None,
        "ProductionVariants": running if found.status == "InService" else None,
    }


@operation("sagemaker", "DeleteEndpoint")
def delete_endpoint(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    name = request["EndpointName"]
    found: Hosted = _require(region.endpoints, region, "endpoint", name)
    if found.status == "Creating":
        raise invalid(f'Cannot update in-progress endpoint "{arn(region, "endpoint", name)}".')
    if any(component.request["EndpointName"] == name for component in region.components.values()):
        raise invalid(f'Cannot delete endpoint "{arn(region, "endpoint", name)}": it has inference components.')
    region.world.clock.start(_delete(found, region.endpoints, name))
    return {}


def _delete(found: Hosted, among: dict[str, Any], name: str) -> Process:
    found.status = "Deleting"
    found.stop()
    yield found.region.seconds("endpoint.delete")
    among.pop(name, None)


@operation("sagemaker", "ListEndpoints")
def list_endpoints(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    found = [name for name in region.endpoints if request.get("NameContains", "") in name]
    return {"Endpoints": [describe_endpoint(region, {"EndpointName": name}) for name in found]}


@operation("sagemaker", "ListTags")
def list_tags(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    for kind, resources in (("endpoint", region.endpoints), ("inference-component", region.components)):
        for name, hosted in resources.items():
            if arn(region, kind, name) == request["ResourceArn"]:
                return {"Tags": hosted.tags}
    for kind, made in (("model", region.models), ("endpoint-config", region.endpoint_configs)):
        for name, described in made.items():
            if arn(region, kind, name) == request["ResourceArn"]:
                return {"Tags": described.get("Tags", [])}
    raise invalid(f"Could not find resource {request['ResourceArn']}")


@operation("sagemaker", "CreateInferenceComponent")
def create_inference_component(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    name = request["InferenceComponentName"]
    _new(region.components, region, "inference component", name)
    endpoint: Hosted = _require(region.endpoints, region, "endpoint", request["EndpointName"])
    if endpoint.status != "InService":
        raise invalid(f"Endpoint {request['EndpointName']} is {endpoint.status}")
    model = _require(region.models, region, "model", request["Specification"]["ModelName"])
    component = Hosted(region, request, request.get("Tags", []))
    region.components[name] = component
    log_group = f"/aws/sagemaker/InferenceComponents/{name}"
    region.world.clock.start(component.start(model, log_group, request["VariantName"]))
    return {"InferenceComponentArn": arn(region, "inference-component", name)}


@operation("sagemaker", "DescribeInferenceComponent")
def describe_inference_component(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    name = request["InferenceComponentName"]
    found: Hosted = _require(region.components, region, "inference component", name)
    return {
        "InferenceComponentName": name,
        "InferenceComponentArn": arn(region, "inference-component", name),
        "EndpointName": found.request["EndpointName"],
        "EndpointArn": arn(region, "endpoint", found.request["EndpointName"]),
        "CreationTime": found.created,
        "LastModifiedTime": found.created,
        "InferenceComponentStatus": found.status,
        "RuntimeConfig": {"DesiredCopyCount": 1, "CurrentCopyCount": int(found.status == "InService")},
        "FailureReason": found.failure or None,
    }


@operation("sagemaker", "DeleteInferenceComponent")
def delete_inference_component(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    name = request["InferenceComponentName"]
    found: Hosted = _require(region.components, region, "inference component", name)
    if found.status == "Creating":
        raise invalid(f'Cannot update in-progress inference component "{arn(region, "inference-component", name)}".')
    region.world.clock.start(_delete(found, region.components, name))
    return {}


@operation("application-autoscaling", "RegisterScalableTarget")
def register_scalable_target(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    name = request["ResourceId"].removeprefix("inference-component/")
    _require(region.components, region, "inference component", name)
    region.scalable_targets[request["ResourceId"]] = {**request, "policies": {}}
    return {"ScalableTargetARN": f"arn:aws:application-autoscaling:{region.name}:{ACCOUNT}:scalable-target/{name}"}


@operation("application-autoscaling", "PutScalingPolicy")
def put_scaling_policy(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    target = region.scalable_targets.get(request["ResourceId"])
    if target is None:
        raise AwsError("ObjectNotFoundException", "No scalable target registered")
    target["policies"][request["PolicyName"]] = request
    return {
        "PolicyARN": f"arn:aws:autoscaling:{region.name}:{ACCOUNT}:scalingPolicy:{request['PolicyName']}",
        "Alarms": [],
    }


@operation("application-autoscaling", "DeregisterScalableTarget")
def deregister_scalable_target(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    if region.scalable_targets.pop(request["ResourceId"], None) is None:
        raise AwsError("ObjectNotFoundException", "No scalable target registered")
    return {}
