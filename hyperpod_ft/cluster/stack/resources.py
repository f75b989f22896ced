"""What a cluster uses, of the kit's stack or named in the cluster file; and its file system, deleted only on request.

CloudFormation does not delete it (DeletionPolicy of the template). Deleting what no longer exists succeeds."""

from dataclasses import dataclass
from typing import Any

from hyperpod_ft.aws.session import Session, answer_or_none
from hyperpod_ft.aws.stacks import DEADLINE_SECONDS, POLL_SECONDS
from hyperpod_ft.cluster.sections import Existing
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import polls


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


@dataclass(frozen=True)
class FsxFileSystem:
    """FSx for Lustre; AWS charges for its size."""

    id: str
    gib: int


def measure_filesystem(session: Session, fsx_id: str) -> FsxFileSystem | None:
    """The size of a file system; None if it no longer exists, or `fsx_id` is empty."""
    found = _describe(session, fsx_id)
    return FsxFileSystem(fsx_id, int(found["StorageCapacity"])) if found else None


def is_kept(session: Session, fsx_id: str) -> bool:
    """Whether a file system exists and is not being deleted."""
    found = _describe(session, fsx_id)
    return found is not None and found["Lifecycle"] != "DELETING"


def delete_filesystem(session: Session, fsx_id: str) -> None:
    """Delete it and wait: until it is deleted, its network interfaces keep the subnet in use."""
    for waited in polls(POLL_SECONDS):
        found = _describe(session, fsx_id)
        if found is None:
            return
        if found["Lifecycle"] != "DELETING":
            session.client("fsx").delete_file_system(FileSystemId=fsx_id)
        if waited >= DEADLINE_SECONDS:
            raise UserError(f"file system {fsx_id} is still {found['Lifecycle']}", "run the command again")


def _describe(session: Session, fsx_id: str) -> dict[str, Any] | None:
    """FSx's answer; None if it no longer exists, or `fsx_id` is empty."""
    if not fsx_id:
        return None
    describe = session.client("fsx").describe_file_systems
    found = answer_or_none(describe, "FileSystemNotFound", FileSystemIds=[fsx_id])
    return found["FileSystems"][0] if found else None
