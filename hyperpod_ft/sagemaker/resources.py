"""The CloudFormation stack of training jobs and endpoints (`templates/sagemaker/resources.yaml`): role and bucket.

Every function may be interrupted anywhere and called again. Deleting the stack keeps the bucket and what is in it,
unless deleting these is asked for.
"""

from dataclasses import dataclass
from typing import Any

from hyperpod_ft.aws import stacks
from hyperpod_ft.aws.s3 import buckets
from hyperpod_ft.aws.s3.buckets import Bucket
from hyperpod_ft.aws.session import Session, explained
from hyperpod_ft.aws.stacks import (
    OnStackEvent,
    describe,
    outputs,
    parameters,
    require,
    settle,
    update,
    wait_until_settled,
)
from hyperpod_ft.errors import UserError
from hyperpod_ft.shipped import shipped


@dataclass(frozen=True)
class TrainingResources:
    """What a run file's section `sagemaker` names."""

    region: str
    role_arn: str
    bucket: str


def template() -> str:
    """The text of the template."""
    return (shipped("templates") / "sagemaker" / "resources.yaml").read_text()


def deploy(session: Session, progress: OnStackEvent, *, name: str, file_system: bool = False) -> TrainingResources:
    """Create the stack, or update it to this template, and wait. Succeeds if nothing changes.

    `file_system`: whether the role may attach jobs to a VPC. Once allowed, it stays so. Raises UserError if AWS refuses
    or a resource fails.
    """
    with explained(f"stack {name}"):
        client = session.client("cloudformation")
        request = {"StackName": name, "TemplateBody": template(), "Capabilities": ["CAPABILITY_IAM"]}
        stack = wait_until_settled(client, name, progress)
        if stack is None:
            chosen = {"ParameterKey": "FileSystem", "ParameterValue": str(file_system).lower()}
            stack_id = str(client.create_stack(**request, Parameters=[chosen])["StackId"])
            status = settle(client, stack_id, progress, after="")
        else:
            stack_id = str(stack["StackId"])
            _require_ours(stack)
            if stack["StackStatus"] != "UPDATE_ROLLBACK_COMPLETE":  # complete, as it was before its last update
                _require(client, name, stack_id, stack["StackStatus"])
            given = file_system or parameters(stack)["FileSystem"] == "true"
            chosen = {"ParameterKey": "FileSystem", "ParameterValue": str(given).lower()}
            status = update(client, stack_id, request | {"Parameters": [chosen]}, progress)
        _require(client, name, stack_id, status)
        return _resources(describe(client, stack_id) or {})


def delete(session: Session, progress: OnStackEvent, *, name: str, delete_data: bool = False) -> Bucket | None:
    """Delete the stack; with `delete_data` the bucket too, irrevocably. Returns the bucket that is left.

    Succeeds if there is no stack.
    """
    with explained(f"stack {name}"):
        client = session.client("cloudformation")
        stack = wait_until_settled(client, name, progress)
        if stack is None:
            return None
        _require_ours(stack)
        stack_id, bucket = str(stack["StackId"]), outputs(stack).get("Bucket", "")
        if delete_data:
            buckets.delete(session.client("s3"), bucket)
        status = stacks.delete(client, stack_id, progress)
        if status != "DELETE_COMPLETE":
            _require(client, name, stack_id, status)
        return buckets.measure(session.client("s3"), bucket)


def _require_ours(stack: dict[str, Any]) -> None:
    # of any version of the template: `delete --delete-data` empties the bucket that the stack names
    if list(parameters(stack)) != ["FileSystem"] or "of hyperpod-ft need" not in stack.get("Description", ""):
        raise UserError(f"stack {stack['StackName']} was not created by this kit", "pass another name with --name")


def _require(client: Any, name: str, stack_id: str, status: str) -> None:
    delete_stack = f"hyperpod-ft sagemaker delete --name {name}"
    require(client, stack_id, status, delete=delete_stack, delete_again=delete_stack)


def _resources(stack: dict[str, Any]) -> TrainingResources:
    found = outputs(stack)
    return TrainingResources(found["Region"], found["RoleArn"], found["Bucket"])
