"""The CloudFormation stack of a cluster (`templates/cluster/stack.yaml`): deploy, measure, reduce to the data, delete.

Every function may be interrupted anywhere and called again: CloudFormation continues, and the next call waits for it
before it requests anything.

Deleting: a file system cannot outlive its stack, because its network interfaces keep AWS from deleting the subnet,
security group and VPC, and a later stack could not adopt it. So `delete` without the data keeps the stack: it is an
update that removes the NAT gateway and its address, the only other resources that cost money. `deploy` under the same
name restores them and finds the data. Only `delete` with the data deletes the stack, after the file system and the
bucket, which CloudFormation itself never deletes (DeletionPolicy of the template).
"""

from dataclasses import dataclass
from typing import Any

from hyperpod_ft.aws import stacks
from hyperpod_ft.aws.s3 import buckets
from hyperpod_ft.aws.s3.buckets import Bucket
from hyperpod_ft.aws.session import Session, explained
from hyperpod_ft.aws.stacks import (
    OnStackEvent,
    StackEvent,
    describe,
    in_progress,
    outputs,
    parameters,
    require,
    settle,
    update,
    wait_until_settled,
)
from hyperpod_ft.cluster.config import ClusterConfig
from hyperpod_ft.cluster.stack.resources import (
    ClusterResources,
    FsxFileSystem,
    delete_filesystem,
    is_kept,
    measure_filesystem,
)
from hyperpod_ft.errors import UserError
from hyperpod_ft.shipped import shipped

# After a failed creation CloudFormation can only delete the stack; its resources hold no data yet.
_NEVER_CREATED = ("ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "CREATE_FAILED", "REVIEW_IN_PROGRESS")


@dataclass(frozen=True)
class Remaining:
    """Resources that still exist and cost money; empty or None for those that do not."""

    stack: str = ""
    filesystem: FsxFileSystem | None = None
    bucket: Bucket | None = None
    nat_gateway_id: str = ""
    elastic_ip: str = ""


def template() -> str:
    """The text of the template."""
    return (shipped("templates") / "cluster" / "stack.yaml").read_text()


def _silent(_: StackEvent) -> None:
    pass


def deploy(session: Session, config: ClusterConfig, progress: OnStackEvent = _silent) -> ClusterResources:
    """Create the stack, or update it to this cluster file and this template, and wait. Succeeds if nothing changes.

    Raises UserError if AWS refuses or a resource fails; names the first one that failed, and what to do.
    """
    with explained(f"stack {config.stack_name}"):
        client = session.client("cloudformation")
        stack = wait_until_settled(client, config.stack_name, progress)
        request = _request(config)
        if stack is None and (stack_id := _create(client, request)):
            status = settle(client, stack_id, progress, after="")
            _require(client, stack_id, status)
        else:
            stack = stack or wait_until_settled(client, config.stack_name, progress)
            assert stack is not None, "CreateStack answered AlreadyExists"
            stack_id = str(stack["StackId"])
            _require_ours(stack)
            _require_updatable(client, stack)
            _require(client, stack_id, update(client, stack_id, request, progress))
        found = describe(client, stack_id)
        assert found is not None, "a stack is found by its id even after deletion"
        if not is_kept(session, outputs(found)["FsxId"]):
            raise UserError(
                f"stack {config.stack_name}: its file system was deleted, by hand or by an interrupted delete",
                "finish deleting with `hyperpod-ft cluster delete --delete-data`, then create it again",
            )
        return _cluster_resources(found)


def require_deployable(client: Any, name: str) -> None:
    """Raise UserError if `deploy` would. `client`: CloudFormation's."""
    stack = describe(client, name)
    if stack is not None and not in_progress(str(stack["StackStatus"])):
        _require_ours(stack)
        _require_updatable(client, stack)


def subnet_id(config: ClusterConfig, client: Any) -> str:
    """The nodes' subnet; empty if the stack has not created it. `client`: CloudFormation's."""
    if config.existing:
        return config.existing.subnet_id
    return outputs(describe(client, config.stack_name) or {}).get("PrivateSubnetId", "")


def delete(session: Session, name: str, progress: OnStackEvent = _silent, *, delete_data: bool = False) -> Remaining:
    """Remove what costs money except the data; with `delete_data` everything, irrevocably. Returns what remains.

    The caller has deleted the cluster, so nothing uses the file system and the bucket. A stack whose creation failed is
    deleted whole. Succeeds if there is no stack.
    """
    with explained(f"stack {name}"):
        client = session.client("cloudformation")
        stack = wait_until_settled(client, name, progress)
        if stack is None:
            return Remaining()
        _require_ours(stack)
        if delete_data or stack["StackStatus"] in _NEVER_CREATED:
            resources = _resources(client, stack)
            delete_filesystem(session, resources.get("FileSystem", ""))
            buckets.delete(session.client("s3"), resources.get("Bucket", ""))
            _delete_stack(client, str(stack["StackId"]), progress)
        else:
            _keep_data_only(client, stack, progress)
    return remains(session, name)


def remains(session: Session, name: str) -> Remaining:
    """The stack's resources that cost money, as each service reports them."""
    with explained(f"stack {name}"):
        client = session.client("cloudformation")
        stack = describe(client, name)
        if stack is None:
            return Remaining()
        resources = _resources(client, stack)
        return Remaining(
            name,
            measure_filesystem(session, resources.get("FileSystem", "")),
            buckets.measure(session.client("s3"), resources.get("Bucket", "")),
            resources.get("Nat", ""),
            resources.get("ElasticIp", ""),
        )


def _request(config: ClusterConfig) -> dict[str, Any]:
    database, keys = config.accounting_database, config.kms_keys
    given = {
        "AvailabilityZoneId": config.availability_zone_id,
        "NatGateway": "true",
        "FsxStorageGiB": str(config.fsx.size_gib),
        "FsxThroughput": str(config.fsx.throughput),  # MB/s per TiB
        "FsxCompression": config.fsx.compression,
        # empty: AWS's own keys
        "VolumesKey": keys.volumes or "",
        "FsxKey": keys.fsx or "",
        "BucketKey": keys.bucket or "",
        "AccountingSecret": database.secret_arn if database else "",
    }
    return {
        "StackName": config.stack_name,
        "TemplateBody": template(),
        "Parameters": [{"ParameterKey": key, "ParameterValue": value} for key, value in given.items()],
        "Capabilities": ["CAPABILITY_IAM"],  # the execution role
        "Tags": [{"Key": key, "Value": value} for key, value in config.tags.items()],
    }


def _create(client: Any, request: dict[str, Any]) -> str:
    """The id of the new stack; empty if it exists: another command created it, or this one, whose answer was lost."""
    try:
        return str(client.create_stack(**request)["StackId"])
    except client.exceptions.AlreadyExistsException:
        return ""


def _require_ours(stack: dict[str, Any]) -> None:
    """Raise UserError for a stack that is not of this template, so that it is neither changed nor deleted."""
    if not {"NatGateway", "FsxStorageGiB"} <= parameters(stack).keys():
        raise UserError(
            f"stack {stack['StackName']} was not created by this kit", "choose another name for the cluster"
        )


def _require_updatable(client: Any, stack: dict[str, Any]) -> None:
    """Raise UserError for an incomplete stack. One whose last update was rolled back is complete."""
    if stack["StackStatus"] != "UPDATE_ROLLBACK_COMPLETE":
        _require(client, str(stack["StackId"]), str(stack["StackStatus"]))


def _cluster_resources(stack: dict[str, Any]) -> ClusterResources:
    found = outputs(stack)
    return ClusterResources(
        subnet_id=found["PrivateSubnetId"],
        security_group_ids=(found["SecurityGroupId"],),
        role_arn=found["RoleArn"],
        bucket=found["Bucket"],
        fsx_dns_name=found["FsxDnsName"],
        fsx_mount_name=found["FsxMountName"],
    )


def _resources(client: Any, stack: dict[str, Any]) -> dict[str, str]:
    """Physical ids by logical id, of resources that CloudFormation has not deleted.

    A stack that was deleted without this kit no longer lists its file system and bucket; the outputs still name them.
    """
    pages = client.get_paginator("list_stack_resources")
    found = outputs(stack)
    kept = {"FileSystem": found.get("FsxId", ""), "Bucket": found.get("Bucket", "")}
    return kept | {
        resource["LogicalResourceId"]: resource["PhysicalResourceId"]
        for page in pages.paginate(StackName=stack["StackId"])
        for resource in page["StackResourceSummaries"]
        if resource.get("PhysicalResourceId") and resource["ResourceStatus"] != "DELETE_COMPLETE"
    }


def _keep_data_only(client: Any, stack: dict[str, Any], progress: OnStackEvent) -> None:
    stack_id = str(stack["StackId"])
    _require_updatable(client, stack)
    kept = [key for key in parameters(stack) if key != "NatGateway"]
    request = {
        "StackName": stack_id,
        "UsePreviousTemplate": True,
        "Parameters": [
            {"ParameterKey": "NatGateway", "ParameterValue": "false"},
            *({"ParameterKey": key, "UsePreviousValue": True} for key in kept),
        ],
        "Capabilities": ["CAPABILITY_IAM"],
    }
    _require(client, stack_id, update(client, stack_id, request, progress))


def _delete_stack(client: Any, stack_id: str, progress: OnStackEvent) -> None:
    status = stacks.delete(client, stack_id, progress)
    if status != "DELETE_COMPLETE":
        _require(client, stack_id, status)


def _require(client: Any, stack_id: str, status: str) -> None:
    delete_stack = "hyperpod-ft cluster delete"
    require(client, stack_id, status, delete=delete_stack, delete_again=f"{delete_stack} --delete-data")
