"""CloudFormation stacks: their state and events while CloudFormation works on them, and changing them.

`client` is boto3's for cloudformation throughout; a stack is an entry of DescribeStacks."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from hyperpod_ft.aws.session import error_code, error_message, redacted
from hyperpod_ft.errors import UserError
from hyperpod_ft.polling import polls
from hyperpod_ft.progress import PrintLine

POLL_SECONDS = 5.0
DEADLINE_SECONDS = 3600.0  # a file system takes ten minutes, rarely more than thirty
_DONE = ("CREATE_COMPLETE", "UPDATE_COMPLETE")
# CloudFormation's reasons for resources that were cancelled because another one failed.
_CONSEQUENCES = ("Resource creation cancelled", "Resource update cancelled")


@dataclass(frozen=True)
class StackEvent:
    """One line of CloudFormation's log. `status`: CREATE_IN_PROGRESS, CREATE_COMPLETE, CREATE_FAILED, ..."""

    id: str
    time: datetime
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


OnStackEvent = Callable[[StackEvent], None]


def reporter(name: str, report: PrintLine) -> OnStackEvent:
    """Reports the events of stack `name` that are worth reporting, a line each."""

    def on_event(event: StackEvent) -> None:
        if event.worth_reporting:
            report(f"stack {name}: {event}")

    return on_event


def describe(client: Any, name: str) -> dict[str, Any] | None:
    """The stack of this name or id, from DescribeStacks; None if it does not exist."""
    try:
        found: list[dict[str, Any]] = client.describe_stacks(StackName=name)["Stacks"]
    except client.exceptions.ClientError as error:
        # There is no error code for this case alone.
        if error_code(error) == "ValidationError" and "does not exist" in error_message(error):
            return None
        raise
    return found[0]


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
                event["Timestamp"],
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


def settle(client: Any, stack_id: str, progress: OnStackEvent, *, after: str) -> str:
    """Wait until CloudFormation has finished a request; each of its events goes to `progress`.

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
            progress(event)
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


def require(client: Any, stack_id: str, status: str, *, delete: str, delete_again: str) -> None:
    """Raise UserError unless `status` is that of a complete stack.

    `delete`: the command that deletes a stack whose creation failed; `delete_again`: one whose deletion failed.
    """
    if status in _DONE:
        return
    name = _name(stack_id)
    if in_progress(status):
        raise UserError(f"stack {name} is {status}", "wait until the stack is complete, then run the command again")
    problem = f"stack {name} is {status}: {why(client, stack_id)}"
    if status == "UPDATE_ROLLBACK_COMPLETE":
        raise UserError(problem, "nothing has changed; fix the cause, then run the command again")
    if status == "UPDATE_ROLLBACK_FAILED":
        command = f"`aws cloudformation continue-update-rollback --stack-name {name}`"
        raise UserError(problem, f"fix the cause, run {command}, then run this command again")
    if status == "DELETE_FAILED":
        raise UserError(problem, f"remove what still uses it, then run `{delete_again}`")
    raise UserError(problem, f"fix the cause, run `{delete}`, then create it again")


def _name(stack_id: str) -> str:
    """arn:aws:cloudformation:REGION:ACCOUNT:stack/NAME/UUID"""
    return stack_id.split("/")[1]


def wait_until_settled(client: Any, name: str, progress: OnStackEvent) -> dict[str, Any] | None:
    """The stack, once CloudFormation has finished any earlier request; None if it does not exist."""
    stack = describe(client, name)
    if stack and in_progress(str(stack["StackStatus"])):
        settle(client, str(stack["StackId"]), progress, after="")
        stack = describe(client, name)
    return stack


def update(client: Any, stack_id: str, request: dict[str, Any], progress: OnStackEvent) -> str:
    """Update and wait. Returns the stack's final state, UPDATE_COMPLETE if nothing changes."""
    before = last_event(client, stack_id)
    try:
        client.update_stack(**request)
    except client.exceptions.ClientError as error:
        if error_code(error) == "ValidationError" and "No updates are to be performed" in error_message(error):
            return "UPDATE_COMPLETE"
        raise
    return settle(client, stack_id, progress, after=before)


def delete(client: Any, stack_id: str, progress: OnStackEvent) -> str:
    """Delete and wait. Returns the stack's final state, DELETE_COMPLETE unless a resource could not be deleted."""
    before = last_event(client, stack_id)
    client.delete_stack(StackName=stack_id)
    return settle(client, stack_id, progress, after=before)


def parameters(stack: dict[str, Any]) -> dict[str, str]:
    """The stack's parameters by name."""
    return {each["ParameterKey"]: each["ParameterValue"] for each in stack.get("Parameters", [])}


def outputs(stack: dict[str, Any]) -> dict[str, str]:
    """The stack's outputs by name; empty before its resources are complete."""
    return {output["OutputKey"]: output["OutputValue"] for output in stack.get("Outputs", [])}
