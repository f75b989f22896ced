"""CloudFormation's operations on the stacks of stacks.py: names, pages, and states in which AWS refuses them."""

import itertools
from typing import Any

from tests.aws.stacks import Stack, find
from tests.aws.wire import AwsError, operation
from tests.aws.world import Region


@operation("cloudformation", "CreateStack")
def create_stack(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    if any(s.name == request["StackName"] and s.status != "DELETE_COMPLETE" for s in region.stacks):
        raise AwsError("AlreadyExistsException", f"Stack [{request['StackName']}] already exists")
    return {"StackId": Stack(region, request).id}


@operation("cloudformation", "CreateChangeSet")
def create_change_set(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    """The change set of a new stack; no test executes it."""
    stack = Stack(region, request, reviewed=True)
    return {"StackId": stack.id, "Id": stack.id.replace(":stack/", ":changeSet/")}


@operation("cloudformation", "UpdateStack")
def update_stack(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    stack = find(region, request["StackName"])
    if stack.status not in ("CREATE_COMPLETE", "UPDATE_COMPLETE", "UPDATE_ROLLBACK_COMPLETE"):
        raise AwsError("ValidationError", f"Stack:{stack.id} is in {stack.status} state and can not be updated.")
    stack.update(request)
    return {"StackId": stack.id}


@operation("cloudformation", "DeleteStack")
def delete_stack(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    try:
        stack = find(region, request["StackName"])
    except AwsError:
        return {}  # AWS too returns nothing
    deletable = ("DELETE_IN_PROGRESS", "CREATE_IN_PROGRESS", "REVIEW_IN_PROGRESS")
    if stack.status.endswith("IN_PROGRESS") and stack.status not in deletable:
        raise AwsError("ValidationError", f"Stack [{stack.id}] cannot be deleted while in status {stack.status}")
    stack.delete()
    return {}


@operation("cloudformation", "DescribeStacks")
def describe_stacks(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    if "StackName" in request:
        return {"Stacks": [find(region, request["StackName"]).describe()]}
    return {"Stacks": [stack.describe() for stack in region.stacks if stack.status != "DELETE_COMPLETE"]}


@operation("cloudformation", "DescribeStackEvents")
def describe_stack_events(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    """Newest first, a hundred a page."""
    events = find(region, request["StackName"]).events[::-1]
    first = int(request.get("NextToken") or 0)
    token = {"NextToken": str(first + 100)} if first + 100 < len(events) else {}
    return {"StackEvents": list(itertools.islice(events, first, first + 100)), **token}


@operation("cloudformation", "ListStackResources")
def list_stack_resources(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    return {"StackResourceSummaries": find(region, request["StackName"]).describe_resources()}


@operation("cloudformation", "GetTemplate")
def get_template(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    return {"TemplateBody": find(region, request["StackName"]).template_body, "StagesAvailable": ["Original"]}
