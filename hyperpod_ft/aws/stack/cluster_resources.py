"""The resources that a cluster uses: those of the kit's stack, or the cluster file's `existing` ones."""

from dataclasses import dataclass

from hyperpod_ft.aws.session import Session
from hyperpod_ft.config.cluster_config import Existing
from hyperpod_ft.errors import UserError


@dataclass(frozen=True)
class ClusterResources:
    """The account's resources that a request of `CreateCluster` names."""

    subnet_id: str  # private; holds every node
    security_group_ids: tuple[str, ...]
    role_arn: str
    bucket: str
    fsx_dns_name: str
    fsx_mount_name: str


def of_existing(existing: Existing, session: Session) -> ClusterResources:
    """The named resources, completed by asking FSx. Raises UserError for a file system that is not Lustre."""
    (volume,) = session.client("fsx").describe_file_systems(FileSystemIds=[existing.fsx_id])["FileSystems"]
    mount_name = volume.get("LustreConfiguration", {}).get("MountName", "")
    if not mount_name:
        raise UserError(
            f"existing.fsx_id: {existing.fsx_id} is {volume['FileSystemType']}", "name an FSx for Lustre file system"
        )
    return ClusterResources(
        subnet_id=existing.subnet_id,
        security_group_ids=existing.security_group_ids,
        role_arn=existing.execution_role_arn,
        bucket=existing.bucket,
        fsx_dns_name=volume["DNSName"],
        fsx_mount_name=mount_name,
    )
