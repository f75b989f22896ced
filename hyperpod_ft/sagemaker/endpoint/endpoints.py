"""Creates, describes and deletes endpoints, and what belongs to them, in SageMaker.

`client` is boto3's for sagemaker throughout. Describing a resource that does not exist gives None, and deleting it
succeeds. Creating one that exists succeeds too: an interrupted command made it, since names of models and
configurations stand for their content.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from hyperpod_ft.aws.session import error_code, error_message
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import PrintLine, polls
from hyperpod_ft.sagemaker.endpoint.endpoint_request import component_name
from hyperpod_ft.sagemaker.section import RUN_TAG

IN_SERVICE, CREATING, FAILED, DELETING = "InService", "Creating", "Failed", "Deleting"
# SageMaker's APIs are eventually consistent: a configuration that was just created may not be found yet.
_CONSISTENT_SECONDS = 30.0
_PAUSE_SECONDS = 1.0


@dataclass(frozen=True)
class Endpoint:
    """An endpoint, from DescribeEndpoint and its configuration. `status`: Creating, InService, Failed, Deleting, ..."""

    name: str
    arn: str
    status: str
    failure: str
    config: str  # name of its configuration
    created: datetime
    instance_type: str  # without `ml.`; empty when the configuration no longer exists
    instances: int  # running now


@dataclass(frozen=True)
class Component:
    """The inference component of an endpoint that scales to zero."""

    name: str
    arn: str
    status: str
    failure: str


@dataclass(frozen=True)
class Endpoints:
    """SageMaker's operations on endpoints and what they consist of. `client` is boto3's."""

    client: Any
    report: PrintLine

    def find(self, name: str) -> Endpoint | None:
        described = _found(self.client.describe_endpoint, EndpointName=name)
        if described is None:
            return None
        config = _found(self.client.describe_endpoint_config, EndpointConfigName=described["EndpointConfigName"])
        variant = config["ProductionVariants"][0] if config else {}
        running = described.get("ProductionVariants", [{}])[0].get("CurrentInstanceCount", 0)
        return Endpoint(
            name,
            described["EndpointArn"],
            described["EndpointStatus"],
            described.get("FailureReason", ""),
            described["EndpointConfigName"],
            described["CreationTime"],
            variant.get("InstanceType", "").removeprefix("ml."),
            running,
        )

    def require(self, name: str) -> None:
        """Raise UserError when no endpoint has this name."""
        if self.find(name) is None:
            raise UserError(f"no endpoint {name}", "`hyperpod-ft deploy list` shows those of a region; check --region")

    def component(self, endpoint: str) -> Component | None:
        """The endpoint's inference component, if it has one."""
        name = component_name(endpoint)
        described = _found(self.client.describe_inference_component, InferenceComponentName=name)
        if described is None:
            return None
        return Component(
            name,
            described["InferenceComponentArn"],
            described["InferenceComponentStatus"],
            described.get("FailureReason", ""),
        )

    def name_of_component(self, endpoint: str) -> str | None:
        """None when the endpoint has no inference component: it does not scale to zero."""
        found = self.component(endpoint)
        return found.name if found else None

    def create_model(self, request: dict[str, Any]) -> None:
        if _found(self.client.describe_model, ModelName=request["ModelName"]) is None:
            self._create("model", self.client.create_model, request, request["ModelName"])

    def create_config(self, request: dict[str, Any]) -> None:
        name = request["EndpointConfigName"]
        if _found(self.client.describe_endpoint_config, EndpointConfigName=name) is None:
            self._create("configuration", self.client.create_endpoint_config, request, name)

    def create_endpoint(self, request: dict[str, Any]) -> None:
        self._create("endpoint", self.client.create_endpoint, request, request["EndpointName"])

    def create_component(self, request: dict[str, Any]) -> None:
        name = request["InferenceComponentName"]
        if _found(self.client.describe_inference_component, InferenceComponentName=name) is None:
            self._create("inference component", self.client.create_inference_component, request, name)

    def _create(self, kind: str, create: Callable[..., Any], request: dict[str, Any], name: str) -> None:
        for waited in polls(_PAUSE_SECONDS):
            try:
                create(**request)
            except self.client.exceptions.ClientError as error:
                message = error_message(error)
                if "already existing" in message or "already exists" in message:
                    return
                if "Could not find" not in message or waited >= _CONSISTENT_SECONDS:
                    raise
            else:
                self.report(f"created {kind} {name}")
                return

    def models(self, endpoint: str) -> list[str]:
        """Names of the models that were made for an endpoint."""
        return self._names("list_models", "Models", "Model", endpoint)

    def configs(self, endpoint: str) -> list[str]:
        """Names of the configurations that were made for an endpoint."""
        return self._names("list_endpoint_configs", "EndpointConfigs", "EndpointConfig", endpoint)

    def _names(self, operation: str, entries: str, kind: str, endpoint: str) -> list[str]:
        pages = self.client.get_paginator(operation).paginate(NameContains=f"{endpoint}-")
        found = {entry[f"{kind}Name"]: entry[f"{kind}Arn"] for page in pages for entry in page[entries]}
        # others may have given such a name to what is theirs
        return [name for name, arn in found.items() if name.startswith(f"{endpoint}-") and self.run_of(arn)]

    def bundle(self, model: str) -> str:
        """The S3 prefix of a model's files, with a slash at its end; empty when it has none."""
        described = _found(self.client.describe_model, ModelName=model) or {}
        source = described.get("PrimaryContainer", {}).get("ModelDataSource", {}).get("S3DataSource", {})
        return str(source.get("S3Uri", ""))

    def server_variables(self, model: str) -> dict[str, str]:
        """The variables of a model's container."""
        described = _found(self.client.describe_model, ModelName=model) or {}
        return dict(described.get("PrimaryContainer", {}).get("Environment", {}))

    def all_names(self) -> list[str]:
        """Every endpoint of the account in the region, newest first."""
        pages = self.client.get_paginator("list_endpoints").paginate(SortBy="CreationTime", SortOrder="Descending")
        return [entry["EndpointName"] for page in pages for entry in page["Endpoints"]]

    def run_of(self, arn: str) -> str:
        """The run, name/id, that a resource's tag names; empty when the kit did not make it, or it does not exist."""
        listed = _found(self.client.get_paginator("list_tags").paginate(ResourceArn=arn).build_full_result) or {}
        tags = {tag["Key"]: tag["Value"] for tag in listed.get("Tags", [])}
        return str(tags.get(RUN_TAG, ""))

    def delete_endpoint(self, name: str) -> None:
        """Does nothing if SageMaker refuses, because the endpoint is still being created or changed."""
        self._delete(self.client.delete_endpoint, EndpointName=name)

    def delete_component(self, endpoint: str) -> None:
        """Does nothing if SageMaker refuses, because the component is still being created or changed."""
        self._delete(self.client.delete_inference_component, InferenceComponentName=component_name(endpoint))

    def _delete(self, delete: Callable[..., Any], **name: str) -> None:
        try:
            _found(delete, **name)
        except self.client.exceptions.ClientError as error:
            if error_code(error) != "ValidationException":
                raise

    def delete_config(self, name: str) -> None:
        _found(self.client.delete_endpoint_config, EndpointConfigName=name)
        self.report(f"deleted configuration {name}")

    def delete_model(self, name: str) -> None:
        _found(self.client.delete_model, ModelName=name)
        self.report(f"deleted model {name}")


def _found(call: Callable[..., Any], **arguments: str) -> dict[str, Any] | None:
    """The answer; None when the resource does not exist, which SageMaker reports as a ValidationException."""
    from botocore.exceptions import ClientError  # noqa: PLC0415 - the caller has imported it

    try:
        answer: dict[str, Any] = call(**arguments)
    except ClientError as error:
        missing = "Could not find" in error_message(error) or "does not exist" in error_message(error)
        if error_code(error) == "ResourceNotFound" or (error_code(error) == "ValidationException" and missing):
            return None
        raise
    return answer
