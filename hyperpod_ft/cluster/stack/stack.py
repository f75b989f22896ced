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

from hyperpod_ft.aws.s3 import buckets
from hyperpod_ft.aws.s3.buckets import Bucket
from hyperpod_ft.aws.session import Session, explained, paged
from hyperpod_ft.aws.stacks import KitStack, describe, outputs, parameters
from hyperpod_ft.cluster.config import ClusterConfig
from hyperpod_ft.cluster.stack.resources import (
    ClusterResources,
    FsxFileSystem,
    delete_filesystem,
    is_kept,
    measure_filesystem,
)
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import PrintLine
from hyperpod_ft.shipped import shipped

# After a failed creation CloudFormation can only delete the stack; its resources hold no data yet.
_NEVER_CREATED = ("ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "CREATE_FAILED", "REVIEW_IN_PROGRESS")


@dataclass(frozen=True)
class Remaining:
    """Resources that still exist and cost money; empty or None for those that do not."""

    filesystem: FsxFileSystem | None = None
    bucket: Bucket | None = None
    nat_gateway_id: str = ""
    elastic_ip: str = ""


def template() -> str:
    """The text of the template."""
    return (shipped("templates") / "cluster" / "stack.yaml").read_text()


def deploy(session: Session, config: ClusterConfig, report: PrintLine = print) -> ClusterResources:
    """Create the stack, or update it to this cluster file and this template, and wait. Succeeds if nothing changes.

    Raises UserError if AWS refuses or a resource fails; names the first one that failed, and what to do.
    """
    with explained(f"stack {config.stack_name}"):
        client = session.client("cloudformation")
        found = kit_stack(client, config.stack_name, report).deploy(template(), _parameters(config), config.tags)
        if not is_kept(session, outputs(found)["FsxId"]):
            raise UserError(
                f"stack {config.stack_name}: its file system was deleted, by hand or by an interrupted delete",
                "finish deleting with `hyperpod-ft cluster delete --delete-data`, then create it again",
            )
        return _cluster_resources(found)


def kit_stack(client: Any, name: str, report: PrintLine) -> KitStack:
    """A cluster's stack. `client`: CloudFormation's."""
    return KitStack(
        client,
        name,
        lambda stack: {"NatGateway", "FsxStorageGiB"} <= parameters(stack).keys(),
        "choose another name for the cluster",
        delete_command="hyperpod-ft cluster delete",
        delete_again="hyperpod-ft cluster delete --delete-data",
        report=report,
    )


def subnet_id(config: ClusterConfig, client: Any) -> str:
    """The nodes' subnet; empty if the stack has not created it. `client`: CloudFormation's."""
    if config.existing:
        return config.existing.subnet_id
    return outputs(describe(client, config.stack_name) or {}).get("PrivateSubnetId", "")


def delete(session: Session, name: str, report: PrintLine = print, *, delete_data: bool = False) -> Remaining:
    """Remove what costs money except the data; with `delete_data` everything, irrevocably. Returns what remains.

    The caller has deleted the cluster, so nothing uses the file system and the bucket. A stack whose creation failed is
    deleted whole. Succeeds if there is no stack.
    """
    with explained(f"stack {name}"):
        client = session.client("cloudformation")
        stack = kit_stack(client, name, report)
        found = stack.find()
        if found is None:
            return Remaining()
        if delete_data or found["StackStatus"] in _NEVER_CREATED:
            resources = _resources(client, found)
            delete_filesystem(session, resources.get("FileSystem", ""))
            buckets.delete(session.client("s3"), resources.get("Bucket", ""))
            stack.delete(found)
        else:
            _keep_data_only(stack, found)
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
            measure_filesystem(session, resources.get("FileSystem", "")),
            buckets.measure(session.client("s3"), resources.get("Bucket", "")),
            resources.get("Nat", ""),
            resources.get("ElasticIp", ""),
        )


def _parameters(config: ClusterConfig) -> dict[str, str]:
    database, keys = config.accounting_database, config.kms_keys
    return {
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
    found = outputs(stack)
    kept = {"FileSystem": found.get("FsxId", ""), "Bucket": found.get("Bucket", "")}
    return kept | {
        resource["LogicalResourceId"]: resource["PhysicalResourceId"]
        for resource in paged(client, "list_stack_resources", "StackResourceSummaries", StackName=stack["StackId"])
        if resource.get("PhysicalResourceId") and resource["ResourceStatus"] != "DELETE_COMPLETE"
    }


def _keep_data_only(stack: KitStack, found: dict[str, Any]) -> None:
    kept = [key for key in parameters(found) if key != "NatGateway"]
    request = {
        "StackName": str(found["StackId"]),
        "UsePreviousTemplate": True,
        "Parameters": [
            {"ParameterKey": "NatGateway", "ParameterValue": "false"},
            *({"ParameterKey": key, "UsePreviousValue": True} for key in kept),
        ],
        "Capabilities": ["CAPABILITY_IAM"],
    }
    stack.update(found, request)
