"""Creates, describes and deletes endpoints, and what belongs to them, in SageMaker.

`client` is boto3's for sagemaker throughout. Describing a resource that does not exist gives None, and deleting it
succeeds. Creating one that exists succeeds too: an interrupted command made it, since names of models and
configurations stand for their content.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from hyperpod_ft.aws.session import error_code, error_message, paged
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import PrintLine, polls
from hyperpod_ft.sagemaker.endpoint.endpoint_request import component_name
from hyperpod_ft.sagemaker.section import RUN_TAG

IN_SERVICE, CREATING, FAILED, DELETING = "InService", "Creating", "Failed", "Deleting"
# SageMaker's APIs are eventually consistent: a configuration that was just created may not be found yet.
_CONSISTENT_SECONDS = 30.0
_PAUSE_SECONDS = 1.0


class Kind(NamedTuple):
    """A kind of SageMaker's resources: in words, in the names of boto3's methods, and the field of its name."""

    words: str
    noun: str
    key: str


MODEL = Kind("model", "model", "ModelName")
CONFIG = Kind("configuration", "endpoint_config", "EndpointConfigName")
ENDPOINT = Kind("endpoint", "endpoint", "EndpointName")
COMPONENT = Kind("inference component", "inference_component", "InferenceComponentName")


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
        described = self._describe(ENDPOINT, name)
        if described is None:
            return None
        config = self._describe(CONFIG, described["EndpointConfigName"])
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
        described = self._describe(COMPONENT, name)
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

    def create(self, kind: Kind, request: dict[str, Any]) -> None:
        name = request[kind.key]
        if self._describe(kind, name) is not None:
            return
        for waited in polls(_PAUSE_SECONDS):
            try:
                getattr(self.client, f"create_{kind.noun}")(**request)
            except self.client.exceptions.ClientError as error:
                message = error_message(error)
                if "already existing" in message or "already exists" in message:
                    return
                if "Could not find" not in message or waited >= _CONSISTENT_SECONDS:
                    raise
            else:
                self.report(f"created {kind.words} {name}")
                return

    def names(self, kind: Kind, endpoint: str) -> list[str]:
        """Names of the models or configurations that were made for an endpoint."""
        listed = kind.key.removesuffix("Name")
        entries = paged(self.client, f"list_{kind.noun}s", f"{listed}s", NameContains=f"{endpoint}-")
        found = {entry[kind.key]: entry[f"{listed}Arn"] for entry in entries}
        # others may have given such a name to what is theirs
        return [name for name, arn in found.items() if name.startswith(f"{endpoint}-") and self.run_of(arn)]

    def container(self, model: str) -> dict[str, Any]:
        """The container of a model; empty when the model does not exist."""
        found: dict[str, Any] = (self._describe(MODEL, model) or {}).get("PrimaryContainer", {})
        return found

    def bundle(self, model: str) -> str:
        """The S3 prefix of a model's files, with a slash at its end; empty when it has none."""
        return str(self.container(model).get("ModelDataSource", {}).get("S3DataSource", {}).get("S3Uri", ""))

    def all_names(self) -> list[str]:
        """Every endpoint of the account in the region, newest first."""
        entries = paged(self.client, "list_endpoints", "Endpoints", SortBy="CreationTime", SortOrder="Descending")
        return [entry["EndpointName"] for entry in entries]

    def run_of(self, arn: str) -> str:
        """The run, name/id, that a resource's tag names; empty when the kit did not make it, or it does not exist."""
        listed = _found(self.client.get_paginator("list_tags").paginate(ResourceArn=arn).build_full_result) or {}
        tags = {tag["Key"]: tag["Value"] for tag in listed.get("Tags", [])}
        return str(tags.get(RUN_TAG, ""))

    def delete(self, kind: Kind, name: str) -> None:
        """Does nothing if SageMaker refuses, because an endpoint or component is still being created or changed."""
        try:
            _found(getattr(self.client, f"delete_{kind.noun}"), **{kind.key: name})
        except self.client.exceptions.ClientError as error:
            if kind in (MODEL, CONFIG) or error_code(error) != "ValidationException":
                raise

    def _describe(self, kind: Kind, name: str) -> dict[str, Any] | None:
        return _found(getattr(self.client, f"describe_{kind.noun}"), **{kind.key: name})


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
