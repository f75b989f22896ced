"""What a cluster stands on: the stack's outputs, or the resources that the cluster file names."""

from collections.abc import Callable

from hyperpod_ft.aws import stack
from hyperpod_ft.aws.cluster_file import ClusterConfig, Existing
from hyperpod_ft.aws.requests import Foundation
from hyperpod_ft.aws.session import Session
from hyperpod_ft.aws.stack import StackOutputs, StackParameters
from hyperpod_ft.aws.stack_data import measure_filesystem
from hyperpod_ft.aws.stack_events import StackEvent, describe
from hyperpod_ft.errors import UserError

Say = Callable[[str], None]


def lay(config: ClusterConfig, session: Session, say: Say, poll_seconds: float) -> Foundation:
    """Make the stack, or bring it up to date; or look up the resources that the cluster file names."""
    if config.existing is not None:
        return of_existing(config.existing, session)
    say(f"stack {config.stack_name}: its NAT gateway, file system and bucket cost money from now on")
    deployed = stack.deploy(
        session,
        stack_parameters(config),
        lambda event: tell_event(config.stack_name, event, say),
        poll_seconds=poll_seconds,
    )
    volume = measure_filesystem(session, deployed.fsx_id)
    if volume is None or volume.lifecycle == "DELETING":
        raise UserError(
            f"stack {config.stack_name}: its file system is gone: deleted by hand, or by a delete that stopped",
            f"finish that: hyperpod-ft cluster delete {config.name} --delete-data; then create it again",
        )
    return of_stack(deployed)


def subnet_id(config: ClusterConfig, session: Session) -> str:
    """The nodes' subnet as it is now; empty where the stack has not made it."""
    return config.existing.subnet_id if config.existing else stack.private_subnet(describe(session, config.stack_name))


def tell_event(name: str, event: StackEvent, say: Say) -> None:
    """Say what became of each resource; that it is begun only of a file system, which takes a quarter of an hour."""
    if event.of_stack or not event.status.endswith("_IN_PROGRESS") or event.resource_type == "AWS::FSx::FileSystem":
        say(f"stack {name}: {event}")


def stack_parameters(config: ClusterConfig) -> StackParameters:
    return StackParameters(
        name=config.stack_name,
        zone_id=config.availability_zone_id,
        fsx_gib=config.fsx.size_gib,
        fsx_throughput=config.fsx.throughput,
        fsx_compression=config.fsx.compression,
        tags=config.tags,
    )


def of_stack(outputs: StackOutputs) -> Foundation:
    return Foundation(
        vpc_id=outputs.vpc_id,
        subnet_id=outputs.private_subnet_id,
        public_subnet_id=outputs.public_subnet_id,
        security_group_ids=(outputs.security_group_id,),
        role_arn=outputs.role_arn,
        bucket=outputs.bucket,
        fsx_id=outputs.fsx_id,
        fsx_dns_name=outputs.fsx_dns_name,
        fsx_mount_name=outputs.fsx_mount_name,
    )


def of_existing(existing: Existing, session: Session) -> Foundation:
    """The named resources, with what only AWS knows of them. Raises UserError for a file system that is not Lustre."""
    (subnet,) = session.client("ec2").describe_subnets(SubnetIds=[existing.subnet_id])["Subnets"]
    (volume,) = session.client("fsx").describe_file_systems(FileSystemIds=[existing.fsx_id])["FileSystems"]
    mount_name = volume.get("LustreConfiguration", {}).get("MountName", "")
    if not mount_name:
        raise UserError(
            f"existing.fsx_id: {existing.fsx_id} is {volume['FileSystemType']}", "name an FSx for Lustre file system"
        )
    return Foundation(
        vpc_id=subnet["VpcId"],
        subnet_id=existing.subnet_id,
        public_subnet_id="",
        security_group_ids=existing.security_group_ids,
        role_arn=existing.execution_role_arn,
        bucket=existing.bucket,
        fsx_id=existing.fsx_id,
        fsx_dns_name=volume["DNSName"],
        fsx_mount_name=mount_name,
    )
