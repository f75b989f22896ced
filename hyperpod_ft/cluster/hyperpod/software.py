"""Patching: `UpdateClusterSoftware` gives nodes another image, and what follows until all have it.

HyperPod does not drain the nodes: it replaces their root volumes under whatever runs there, and runs the lifecycle
scripts again. If the nodes have the newest image already, it does nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hyperpod_ft.cluster.hyperpod import api
from hyperpod_ft.cluster.wait_for_change import Seen
from hyperpod_ft.errors import UserError

# what users lose; what is on the shared volume and in S3 stays
LOST = "their jobs are killed, and everything on their root volumes is lost: installed packages, container images"
LOST_ON_CONTROLLER = "Slurm's queue and, unless it is external, the accounting database"
_RUNNING = ("Pending", "InProgress", "RollbackInProgress")  # SoftwareUpdateStatus
_FAILED = ("Failed", "RollbackComplete")


@dataclass(frozen=True)
class NodeImage:
    """An image of HyperPod's by its version, or any by its id; without both, HyperPod's newest."""

    version: str | None = None
    id: str | None = None  # ami-..., or `default`


def update_request(cluster: str, groups: Sequence[str], image: NodeImage) -> dict[str, Any]:
    """The request of `UpdateClusterSoftware` for these groups."""
    version = {"ImageReleaseVersion": image.version} if image.version else {}
    request: dict[str, Any] = {
        "ClusterName": cluster,
        "InstanceGroups": [{"InstanceGroupName": name, **version} for name in groups],
    }
    if image.id:
        request["ImageId"] = image.id
    return request


def progress(client: Any, cluster: str, groups: Sequence[str]) -> Seen[dict[str, Any]]:
    """How far the update of these groups is; the state is DescribeCluster's answer. Raises UserError."""
    described = api.describe(client, cluster)
    if described is None:
        raise UserError(f"cluster {cluster} no longer exists", "create it again")
    chosen = _chosen(described, groups)
    updating = described["ClusterStatus"] == "SystemUpdating" or any(map(_updating, chosen))
    states = {group["InstanceGroupName"]: _state(group) for group in chosen}
    return Seen(described, states, begun=updating, changing=updating)


def check_updated(described: dict[str, Any], groups: Sequence[str]) -> None:
    """Raises UserError if the update of one of these groups failed."""
    if failed := [group["InstanceGroupName"] for group in _chosen(described, groups) if _status(group) in _FAILED]:
        reason = described.get("FailureMessage") or "HyperPod gave no reason"
        raise UserError(
            f"cluster {described['ClusterName']}: {', '.join(failed)} not updated: {reason.rstrip('.')}",
            "see `hyperpod-ft cluster logs`; the nodes keep or get back their previous image",
        )


def _chosen(described: dict[str, Any], groups: Sequence[str]) -> list[dict[str, Any]]:
    return [group for group in described["InstanceGroups"] if group["InstanceGroupName"] in groups]


def _status(group: dict[str, Any]) -> str:
    return str(group.get("SoftwareUpdateStatus", ""))


def _updating(group: dict[str, Any]) -> bool:
    return _status(group) in _RUNNING or group.get("Status") == "SystemUpdating"


def _state(group: dict[str, Any]) -> str:
    done, of = group.get("TargetStateCount", 0), group.get("TargetCount", 0)
    image = group.get("DesiredImageReleaseVersion") or group.get("DesiredImageId") or ""
    return f"software update {_status(group) or 'requested'}, {done} of {of} have image {image}".rstrip()
