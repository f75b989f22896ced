"""CloudFormation stacks: their state, their events while CloudFormation works on them, and those that the kit makes.

`client` is boto3's for cloudformation throughout; a stack is an entry of DescribeStacks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hyperpod_ft.aws.session import answer_or_none, redacted
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import PrintLine, polls

POLL_SECONDS = 5.0
DEADLINE_SECONDS = 3600.0  # a file system takes ten minutes, rarely more than thirty
_DONE = ("CREATE_COMPLETE", "UPDATE_COMPLETE")
# CloudFormation's reasons for resources that were cancelled because another one failed.
_CONSEQUENCES = ("Resource creation cancelled", "Resource update cancelled")


@dataclass(frozen=True)
class StackEvent:
    """One line of CloudFormation's log. `status`: CREATE_IN_PROGRESS, CREATE_COMPLETE, CREATE_FAILED, ..."""

    id: str
    logical_id: str
    resource_type: str
    status: str
    reason: str

    def __str__(self) -> str:
        what = "the stack" if self.of_stack else f"{self.logical_id} ({self.resource_type})"
        return f"{what}: {self.status}" + (f": {self.reason}" if self.reason else "")

    @property
    def worth_reporting(self) -> bool:
        """The outcome for each resource; the start only for a file system, which takes a quarter of an hour."""
        return self.of_stack or not self.status.endswith("_IN_PROGRESS") or self.resource_type == "AWS::FSx::FileSystem"

    @property
    def of_stack(self) -> bool:
        """Whether the event is the stack's own, not a resource's."""
        return self.resource_type == "AWS::CloudFormation::Stack"


def describe(client: Any, name: str) -> dict[str, Any] | None:
    """The stack of this name or id, from DescribeStacks; None if it does not exist."""
    # there is no error code for this case alone
    found = answer_or_none(client.describe_stacks, "ValidationError", saying="does not exist", StackName=name)
    return found["Stacks"][0] if found else None


def in_progress(status: str) -> bool:
    """Whether CloudFormation works on a stack of this state.

    REVIEW_IN_PROGRESS is the stack of a change set that was not executed: no request is in progress.
    """
    return status.endswith("_IN_PROGRESS") and status != "REVIEW_IN_PROGRESS"


def events(client: Any, stack_id: str, after: str = "") -> list[StackEvent]:
    """The events since the last request to CloudFormation, or since the event `after`; oldest first."""
    found: list[StackEvent] = []
    pages = client.get_paginator("describe_stack_events").paginate(StackName=stack_id)
    for event in (event for page in pages for event in page["StackEvents"]):  # newest first
        if event["EventId"] == after:
            break
        found.append(
            StackEvent(
                event["EventId"],
                event["LogicalResourceId"],
                event["ResourceType"],
                event["ResourceStatus"],
                redacted(event.get("ResourceStatusReason", "")),
            )
        )
        if found[-1].of_stack and found[-1].reason == "User Initiated":
            break
    return found[::-1]


def last_event(client: Any, stack_id: str) -> str:
    """The id of the newest event."""
    page = client.describe_stack_events(StackName=stack_id)
    return str(page["StackEvents"][0]["EventId"])


def settle(client: Any, stack_id: str, report: PrintLine, *, after: str) -> str:
    """Wait until CloudFormation has finished a request; reports its events, a line each.

    `after` is the newest event before the request; empty for a request already in progress, and for a new stack.
    Returns the stack's final state. Raises UserError after an hour; CloudFormation continues.
    """
    reported = ""
    for waited in polls(POLL_SECONDS):
        stack = describe(client, stack_id)
        status = str(stack["StackStatus"]) if stack else "DELETE_COMPLETE"
        for event in events(client, stack_id, after):
            after = event.id
            reported = event.status if event.of_stack else reported
            if event.worth_reporting:
                report(f"stack {_name(stack_id)}: {event}")
        # Both, because AWS may briefly report the state from before the request after accepting it.
        if status == reported and not status.endswith("_IN_PROGRESS"):
            break
        if waited >= DEADLINE_SECONDS:
            raise UserError(
                f"stack {_name(stack_id)}: still {status} after {DEADLINE_SECONDS / 60:.0f} minutes",
                "AWS continues; run the command again to keep waiting",
            )
    return status


def why(client: Any, stack_id: str) -> str:
    """The first resource that failed in the last request, and AWS's reason."""
    for event in events(client, stack_id):
        if event.status.endswith("_FAILED") and not event.of_stack and not event.reason.startswith(_CONSEQUENCES):
            return f"{event.logical_id} ({event.resource_type}): {event.reason.rstrip('.') or event.status}"
    return "CloudFormation gave no reason"


def _name(stack_id: str) -> str:
    """arn:aws:cloudformation:REGION:ACCOUNT:stack/NAME/UUID"""
    return stack_id.split("/")[1]


@dataclass(frozen=True)
class KitStack:
    """A stack of one of the kit's templates. Methods raise UserError if AWS refuses or a resource fails.

    They may be interrupted anywhere and called again: CloudFormation continues, and the next call waits for it before
    it requests anything.
    """

    client: Any
    name: str
    is_ours: Callable[[dict[str, Any]], bool]  # whether a stack is of the template, in any version
    if_not_ours: str  # what to do about another stack of this name
    delete_command: str  # deletes one whose creation failed
    delete_again: str  # deletes one whose deletion failed
    report: PrintLine

    def find(self) -> dict[str, Any] | None:
        """The stack, once CloudFormation has finished any earlier request; None if it does not exist.

        Raises UserError for a stack that is not of this template, so that it is neither changed nor deleted.
        """
        stack = describe(self.client, self.name)
        if stack and in_progress(str(stack["StackStatus"])):
            settle(self.client, str(stack["StackId"]), self.report, after="")
            stack = describe(self.client, self.name)
        if stack:
            self._require_ours(stack)
        return stack

    def deploy(self, template: str, values: Mapping[str, str], tags: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Create the stack, or update it to this template and these parameters, and wait; returns it.

        Succeeds if nothing changes. Without `tags`, those of an existing stack stay.
        """
        request: dict[str, Any] = {
            "StackName": self.name,
            "TemplateBody": template,
            "Parameters": [{"ParameterKey": key, "ParameterValue": value} for key, value in values.items()],
            "Capabilities": ["CAPABILITY_IAM"],  # the execution role
        }
        if tags is not None:
            request["Tags"] = [{"Key": key, "Value": value} for key, value in tags.items()]
        stack = self.find()
        if stack is None and (stack_id := self._create(request)):
            self._require_complete(stack_id, settle(self.client, stack_id, self.report, after=""))
        else:
            stack = stack or self.find()
            assert stack is not None, "CreateStack answered AlreadyExists"
            stack_id = str(stack["StackId"])
            self.update(stack, request)
        found = describe(self.client, stack_id)
        assert found is not None, "a stack is found by its id even after deletion"
        return found

    def require_deployable(self) -> None:
        """Raise UserError if `deploy` would, without waiting for a request that is in progress."""
        stack = describe(self.client, self.name)
        if stack is not None and not in_progress(str(stack["StackStatus"])):
            self._require_ours(stack)
            self._require_updatable(stack)

    def update(self, stack: dict[str, Any], request: dict[str, Any]) -> None:
        """Send a request of UpdateStack and wait. Raises UserError for a stack that is not complete."""
        self._require_updatable(stack)
        stack_id = str(stack["StackId"])
        before = last_event(self.client, stack_id)
        nothing = "No updates are to be performed"
        if answer_or_none(self.client.update_stack, "ValidationError", saying=nothing, **request) is not None:
            self._require_complete(stack_id, settle(self.client, stack_id, self.report, after=before))

    def delete(self, stack: dict[str, Any]) -> None:
        """Delete it and wait."""
        stack_id = str(stack["StackId"])
        before = last_event(self.client, stack_id)
        self.client.delete_stack(StackName=stack_id)
        status = settle(self.client, stack_id, self.report, after=before)
        if status != "DELETE_COMPLETE":
            self._require_complete(stack_id, status)

    def _create(self, request: dict[str, Any]) -> str:
        """The id of the new stack; empty if it exists: created by another command, or by this one, whose answer was
        lost."""
        made = answer_or_none(self.client.create_stack, "AlreadyExistsException", **request)
        return str(made["StackId"]) if made else ""

    def _require_ours(self, stack: dict[str, Any]) -> None:
        if not self.is_ours(stack):
            raise UserError(f"stack {stack['StackName']} was not created by this kit", self.if_not_ours)

    def _require_updatable(self, stack: dict[str, Any]) -> None:
        """Raise UserError for an incomplete stack. One whose last update was rolled back is complete."""
        if stack["StackStatus"] != "UPDATE_ROLLBACK_COMPLETE":
            self._require_complete(str(stack["StackId"]), str(stack["StackStatus"]))

    def _require_complete(self, stack_id: str, status: str) -> None:
        """Raise UserError unless `status` is that of a complete stack."""
        if status in _DONE:
            return
        name = _name(stack_id)
        if in_progress(status):
            raise UserError(f"stack {name} is {status}", "wait until the stack is complete, then run the command again")
        problem = f"stack {name} is {status}: {why(self.client, stack_id)}"
        if status == "UPDATE_ROLLBACK_COMPLETE":
            raise UserError(problem, "nothing has changed; fix the cause, then run the command again")
        if status == "UPDATE_ROLLBACK_FAILED":
            command = f"`aws cloudformation continue-update-rollback --stack-name {name}`"
            raise UserError(problem, f"fix the cause, run {command}, then run this command again")
        if status == "DELETE_FAILED":
            raise UserError(problem, f"remove what still uses it, then run `{self.delete_again}`")
        raise UserError(problem, f"fix the cause, run `{self.delete_command}`, then create it again")


def parameters(stack: dict[str, Any]) -> dict[str, str]:
    """The stack's parameters by name."""
    return {each["ParameterKey"]: each["ParameterValue"] for each in stack.get("Parameters", [])}


def outputs(stack: dict[str, Any]) -> dict[str, str]:
    """The stack's outputs by name; empty before its resources are complete."""
    return {output["OutputKey"]: output["OutputValue"] for output in stack.get("Outputs", [])}
