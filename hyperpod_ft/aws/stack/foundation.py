"""What a cluster stands on, be it of the kit's own stack or the cluster file's `existing` resources."""

from dataclasses import dataclass

from hyperpod_ft.aws.session import Session
from hyperpod_ft.config.cluster_config import Existing
from hyperpod_ft.errors import UserError


@dataclass(frozen=True)
class Foundation:
    """All that a request for a cluster names of the account's resources."""

    subnet_id: str  # private; every node's
    security_group_ids: tuple[str, ...]
    role_arn: str
    bucket: str
    fsx_dns_name: str
    fsx_mount_name: str


def of_existing(existing: Existing, session: Session) -> Foundation:
    """The named resources, with what only AWS knows of them. Raises UserError for a file system that is not Lustre."""
    (volume,) = session.client("fsx").describe_file_systems(FileSystemIds=[existing.fsx_id])["FileSystems"]
    mount_name = volume.get("LustreConfiguration", {}).get("MountName", "")
    if not mount_name:
        raise UserError(
            f"existing.fsx_id: {existing.fsx_id} is {volume['FileSystemType']}", "name an FSx for Lustre file system"
        )
    return Foundation(
        subnet_id=existing.subnet_id,
        security_group_ids=existing.security_group_ids,
        role_arn=existing.execution_role_arn,
        bucket=existing.bucket,
        fsx_dns_name=volume["DNSName"],
        fsx_mount_name=mount_name,
    )
