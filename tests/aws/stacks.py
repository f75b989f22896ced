"""CloudFormation stacks: resources one after another, events, rollback, retained resources, AWS's own refusals.

moto's own stacks exist at once or not at all, have neither states nor resource events, and lack types and functions
that a HyperPod template needs."""

import uuid
from collections.abc import Generator, Iterator
from datetime import datetime, timezone
from typing import Any

from botocore.exceptions import ClientError

from tests.aws import template as templates
from tests.aws.clock import Process
from tests.aws.resource_kinds import Context
from tests.aws.resources import KINDS
from tests.aws.wire import AwsError
from tests.aws.world import ACCOUNT, Region

_POLL_SECONDS = 0.01  # how often CloudFormation polls what takes long
_STACK = "AWS::CloudFormation::Stack"


class Resource:
    def __init__(self, logical_id: str, kind: str, definition: dict[str, Any], properties: dict[str, Any]) -> None:
        self.logical_id, self.kind, self.definition, self.properties = logical_id, kind, definition, properties
        self.physical_id, self.status = "", "CREATE_IN_PROGRESS"
        self.attributes: dict[str, Any] = {}

    @property
    def retained(self) -> bool:
        return self.definition.get("DeletionPolicy") in ("Retain", "RetainExceptOnCreate")


class Stack:
    def __init__(self, region: Region, request: dict[str, Any], *, reviewed: bool = False) -> None:
        """`reviewed`: only a change set is created, which somebody may execute."""
        self.region, self.name = region, request["StackName"]
        self.id = f"arn:aws:cloudformation:{region.name}:{ACCOUNT}:stack/{self.name}/{uuid.uuid4()}"
        self.created = datetime.now(timezone.utc)
        self.status, self.reason = "REVIEW_IN_PROGRESS", ""
        self.events: list[dict[str, Any]] = []
        self.resources: dict[str, Resource] = {}
        self.outputs: dict[str, Any] = {}
        self.template_body: str = ""
        self.tags: list[dict[str, str]] = []
        self._accept(request)
        region.stacks.append(self)
        if reviewed:
            self._event("REVIEW_IN_PROGRESS", "User Initiated")
            return
        region.world.clock.start(self._create())

    def _accept(self, request: dict[str, Any]) -> None:
        self.template_body = request.get("TemplateBody", self.template_body)
        self.template = templates.parse(self.template_body)
        given = {p["ParameterKey"]: p.get("ParameterValue", "") for p in request.get("Parameters", [])}
        for parameter in request.get("Parameters", []):
            if parameter.get("UsePreviousValue"):
                given[parameter["ParameterKey"]] = self.parameters[parameter["ParameterKey"]]
        self.parameters = templates.parameters_of(self.template, given)
        self.tags = request.get("Tags", self.tags)
        self.capabilities = request.get("Capabilities", [])
        types = {resource["Type"] for resource in self.template["Resources"].values()}
        if unknown := types - KINDS.keys():
            raise AwsError("ValidationError", f"Unrecognized resource types: [{', '.join(sorted(unknown))}]")
        if "AWS::IAM::Role" in types and not {"CAPABILITY_IAM", "CAPABILITY_NAMED_IAM"} & set(self.capabilities):
            raise AwsError("InsufficientCapabilitiesException", "Requires capabilities : [CAPABILITY_IAM]")

    @property
    def _resolver(self) -> templates.Resolver:
        variables = {
            "AWS::Region": self.region.name,
            "AWS::AccountId": ACCOUNT,
            "AWS::Partition": "aws",
            "AWS::URLSuffix": "amazonaws.com",
            "AWS::StackName": self.name,
            "AWS::StackId": self.id,
            **self.parameters,
        }
        return templates.Resolver(self.template, variables, self._attribute)

    def _attribute(self, logical_id: str, name: str) -> Any:
        resource = self.resources[logical_id]
        return resource.attributes[name] if name else resource.physical_id

    def _wanted(self) -> Iterator[tuple[str, dict[str, Any]]]:
        definitions, resolver = self.template["Resources"], self._resolver
        for logical_id in templates.order(definitions):
            definition = definitions[logical_id]
            if "Condition" not in definition or resolver.condition(definition["Condition"]):
                yield logical_id, definition

    def _context(self, logical_id: str) -> Context:
        tags = tuple((tag["Key"], tag["Value"]) for tag in self.tags)
        return Context(self.region, logical_id, self.name, self.id, tags)

    def _event(self, status: str, reason: str = "", resource: Resource | None = None) -> None:
        if resource:
            resource.status = status
        else:
            self.status, self.reason = status, reason
        self.events.append(
            {
                "StackId": self.id,
                "StackName": self.name,
                "EventId": str(uuid.uuid4()),
                "LogicalResourceId": resource.logical_id if resource else self.name,
                "PhysicalResourceId": resource.physical_id if resource else self.id,
                "ResourceType": resource.kind if resource else _STACK,
                "Timestamp": datetime.now(timezone.utc),
                "ResourceStatus": status,
                "ResourceStatusReason": reason or None,
            }
        )

    def _make(self, logical_id: str, definition: dict[str, Any]) -> Process:
        kind = definition["Type"]
        resource = Resource(logical_id, kind, definition, self._resolver.value(definition.get("Properties", {})))
        self.resources[logical_id] = resource
        self._event("CREATE_IN_PROGRESS", resource=resource)
        yield self.region.seconds("stack.resource")
        if reason := self.region.world.scenario.fail_resources.get(kind):
            raise AwsError("Failed", reason)
        resource.physical_id, resource.attributes = KINDS[kind].create(self._context(logical_id), resource.properties)
        while (filesystem := self.region.filesystems.get(resource.physical_id)) and filesystem.lifecycle == "CREATING":
            yield _POLL_SECONDS
        self._event("CREATE_COMPLETE", resource=resource)

    def _create(self) -> Process:
        self._event("CREATE_IN_PROGRESS", "User Initiated")
        yield self.region.seconds("stack.resource")
        failed = yield from self._apply()
        if not failed:
            self._finish("CREATE_COMPLETE")
            return
        self._event(
            "ROLLBACK_IN_PROGRESS",
            f"The following resource(s) failed to create: [{failed}]. Rollback requested by user.",
        )
        # Retain applies to a rollback too (that is what RetainExceptOnCreate is for).
        stuck = yield from self._remove(list(self.resources), failed_creation=True)
        self._event("ROLLBACK_FAILED" if stuck else "ROLLBACK_COMPLETE", stuck)

    def _apply(self) -> Generator[float, None, str]:
        """Create what is missing and change what differs; returns the resource that failed, or nothing."""
        for logical_id, definition in self._wanted():
            step = self._change if logical_id in self.resources else self._make
            try:
                yield from step(logical_id, definition)
            except (AwsError, ClientError) as error:
                failed = self.resources[logical_id]
                doing = "CREATE" if failed.status.startswith("CREATE_IN") else "UPDATE"
                self._event(f"{doing}_FAILED", _message(error), failed)
                return logical_id
        return ""

    def _finish(self, status: str) -> None:
        resolver = self._resolver
        self.outputs = {
            name: resolver.value(output["Value"])
            for name, output in self.template.get("Outputs", {}).items()
            if "Condition" not in output or resolver.condition(output["Condition"])
        }
        self._event(status)

    def _remove(self, names: list[str], *, failed_creation: bool = False) -> Generator[float, None, str]:
        """Delete resources, those that others refer to last; returns why some could not be deleted."""
        stuck = []
        for name in [n for n in reversed(self._creation_order()) if n in names]:
            resource = self.resources[name]
            except_on_create = resource.definition.get("DeletionPolicy") == "RetainExceptOnCreate"
            if not resource.physical_id or (resource.retained and not (failed_creation and except_on_create)):
                if resource.physical_id:
                    self._event("DELETE_SKIPPED", resource=resource)
                del self.resources[name]
                continue
            self._event("DELETE_IN_PROGRESS", resource=resource)
            yield self.region.seconds("stack.resource")
            try:
                if reason := self.region.world.scenario.fail_deletions.get(resource.kind):
                    raise AwsError("Failed", reason)
                KINDS[resource.kind].delete(self._context(name), resource.physical_id, resource.properties)
            except (AwsError, ClientError) as error:
                if not _is_gone(error):
                    self._event("DELETE_FAILED", _message(error), resource)
                    stuck.append(name)
                    continue
            while resource.physical_id in self.region.filesystems:
                yield _POLL_SECONDS
            self._event("DELETE_COMPLETE", resource=resource)
            del self.resources[name]
        return f"The following resource(s) failed to delete: [{', '.join(stuck)}]. " if stuck else ""

    def _creation_order(self) -> list[str]:
        return templates.order({name: resource.definition for name, resource in self.resources.items()})

    def update(self, request: dict[str, Any]) -> None:
        before = (self.template_body, self.template, self.parameters, self.tags, self.capabilities)
        if request.get("UsePreviousTemplate"):
            request = {**request, "TemplateBody": self.template_body}
        self._accept(request)
        if (self.template, self.parameters, self.tags) == (before[1], before[2], before[3]):
            raise AwsError("ValidationError", "No updates are to be performed.")
        self.region.world.clock.start(self._update(before))

    def _update(self, before: Any) -> Process:
        self._event("UPDATE_IN_PROGRESS", "User Initiated")
        yield self.region.seconds("stack.resource")
        old = set(self.resources)
        failed = yield from self._apply()
        if failed:
            self._event("UPDATE_ROLLBACK_IN_PROGRESS", f"The following resource(s) failed to update: [{failed}]. ")
            self.template_body, self.template, self.parameters, self.tags, self.capabilities = before
            yield from self._apply()
            stuck = yield from self._remove([name for name in self.resources if name not in old])
            self._event("UPDATE_ROLLBACK_FAILED" if stuck else "UPDATE_ROLLBACK_COMPLETE", stuck)
            return
        self._event("UPDATE_COMPLETE_CLEANUP_IN_PROGRESS")
        wanted = {name for name, _ in self._wanted()}
        yield from self._remove([name for name in self.resources if name not in wanted])
        self._finish("UPDATE_COMPLETE")

    def _change(self, logical_id: str, definition: dict[str, Any]) -> Process:
        resource = self.resources[logical_id]
        resource.definition = definition
        properties = self._resolver.value(definition.get("Properties", {}))
        if properties == resource.properties:
            return
        self._event("UPDATE_IN_PROGRESS", resource=resource)
        yield self.region.seconds("stack.resource")
        change = KINDS[resource.kind].update
        if change is None:
            raise AwsError("Failed", f"This stand-in cannot change a {resource.kind}")
        change(self._context(logical_id), resource.physical_id, properties)
        resource.properties = properties
        self._event("UPDATE_COMPLETE", resource=resource)

    def delete(self) -> None:
        if self.status != "DELETE_IN_PROGRESS":
            self.region.world.clock.start(self._delete())

    def _delete(self) -> Process:
        self._event("DELETE_IN_PROGRESS", "User Initiated")
        yield self.region.seconds("stack.resource")
        stuck = yield from self._remove(list(self.resources))
        self._event("DELETE_FAILED" if stuck else "DELETE_COMPLETE", stuck)

    def describe(self) -> dict[str, Any]:
        described = self.template.get("Outputs", {})
        return {
            "StackId": self.id,
            "StackName": self.name,
            "Description": self.template.get("Description"),
            "Parameters": [{"ParameterKey": k, "ParameterValue": v} for k, v in self.parameters.items()],
            "CreationTime": self.created,
            "StackStatus": self.status,
            "StackStatusReason": self.reason or None,
            "Capabilities": self.capabilities,
            "Tags": self.tags,
            "Outputs": [
                {"OutputKey": name, "OutputValue": str(value), "Description": described[name].get("Description")}
                for name, value in self.outputs.items()
            ],
        }

    def describe_resources(self) -> list[dict[str, Any]]:
        return [
            {
                "StackName": self.name,
                "StackId": self.id,
                "LogicalResourceId": resource.logical_id,
                "PhysicalResourceId": resource.physical_id,
                "ResourceType": resource.kind,
                "Timestamp": self.created,
                "LastUpdatedTimestamp": self.created,
                "ResourceStatus": resource.status,
            }
            for resource in self.resources.values()
        ]


def _message(error: AwsError | ClientError) -> str:
    if isinstance(error, AwsError):
        return error.message
    found = error.response["Error"]
    return f"{found['Message']} (Service: {error.operation_name}, Status Code: 400, Error Code: {found['Code']})"


def _is_gone(error: AwsError | ClientError) -> bool:
    """CloudFormation counts a resource that somebody else deleted as deleted."""
    code = error.code if isinstance(error, AwsError) else error.response["Error"]["Code"]
    return "NotFound" in code or code in ("NoSuchBucket", "NoSuchEntity", "InvalidDocument")


def find(region: Region, name: str) -> Stack:
    """Find a stack: by name while it exists, by id forever."""
    for stack in reversed(region.stacks):
        if name == stack.id or (name == stack.name and stack.status != "DELETE_COMPLETE"):
            return stack
    raise AwsError("ValidationError", f"Stack with id {name} does not exist")
