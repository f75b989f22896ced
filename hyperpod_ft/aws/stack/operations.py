"""What both stacks need of CloudFormation: wait for an earlier request, update, delete, read parameters and outputs.

`client` is boto3's for cloudformation throughout; a stack is an entry of DescribeStacks.
"""

from typing import Any

from hyperpod_ft.aws.session import error_code, error_message
from hyperpod_ft.aws.stack.events import OnStackEvent, describe, in_progress, last_event, settle


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
