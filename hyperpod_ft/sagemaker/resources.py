"""The CloudFormation stack of training jobs and endpoints (`templates/sagemaker/resources.yaml`): role, bucket, mail.

Every function may be interrupted anywhere and called again. Deleting the stack keeps the bucket and what is in it,
unless deleting these is asked for.
"""

from dataclasses import dataclass
from typing import Any

from hyperpod_ft.aws.s3 import buckets
from hyperpod_ft.aws.s3.buckets import Bucket
from hyperpod_ft.aws.session import Session, explained
from hyperpod_ft.aws.stacks import KitStack, outputs, parameters
from hyperpod_ft.progress import PrintLine
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


def deploy(
    session: Session, report: PrintLine, *, name: str, file_system: bool = False, mail: str | None = None
) -> TrainingResources:
    """Create the stack, or update it to this template, and wait. Succeeds if nothing changes.

    `file_system`: whether the role may attach jobs to a VPC. Once allowed, it stays so. `mail`: the address that is
    told about failed and stopped jobs; empty: nobody; None: as it is. Raises UserError if AWS refuses or a resource
    fails.
    """
    with explained(f"stack {name}"):
        stack = _stack(session, report, name)
        before = stack.find()
        given = parameters(before) if before else {}
        allowed = "true" if file_system else given.get("FileSystem", "false")
        address = given.get("Mail", "") if mail is None else mail
        found = outputs(stack.deploy(template(), {"FileSystem": allowed, "Mail": address}))
        return TrainingResources(found["Region"], found["RoleArn"], found["Bucket"])


def delete(session: Session, report: PrintLine, *, name: str, delete_data: bool = False) -> Bucket | None:
    """Delete the stack; with `delete_data` the bucket too, irrevocably. Returns the bucket that is left.

    Succeeds if there is no stack.
    """
    with explained(f"stack {name}"):
        stack = _stack(session, report, name)
        found = stack.find()
        if found is None:
            return None
        bucket = outputs(found).get("Bucket", "")
        if delete_data:
            buckets.delete(session.client("s3"), bucket)
        stack.delete(found)
        return buckets.measure(session.client("s3"), bucket)


def _stack(session: Session, report: PrintLine, name: str) -> KitStack:
    delete_stack = f"hyperpod-ft sagemaker delete --name {name}"
    return KitStack(
        session.client("cloudformation"),
        name,
        _is_ours,
        "pass another name with --name",
        delete_command=delete_stack,
        delete_again=delete_stack,
        report=report,
    )


def _is_ours(stack: dict[str, Any]) -> bool:
    # of any version of the template: `delete --delete-data` empties the bucket that the stack names
    return "FileSystem" in parameters(stack) and "of hyperpod-ft need" in stack.get("Description", "")
