"""Patching: `UpdateClusterSoftware` gives nodes another image, and what follows until all have it.

HyperPod does not drain the nodes: it replaces their root volumes under whatever runs there, and runs the lifecycle
scripts again. If the nodes have the newest image already, it does nothing.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hyperpod_ft.aws.hyperpod import api
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import Report, format_minutes

# what users lose; what is on the shared volume and in S3 stays
LOST = "their jobs are killed, and everything on their root volumes is lost: installed packages, container images"
LOST_ON_CONTROLLER = "Slurm's queue and, unless it is external, the accounting database"
_RUNNING = ("Pending", "InProgress", "RollbackInProgress")  # SoftwareUpdateStatus
_FAILED = ("Failed", "RollbackComplete")
POLLS_UNTIL_BEGUN = 8  # after these, HyperPod has nothing to change


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


def wait_until_updated(
    client: Any,
    cluster: str,
    groups: Sequence[str],
    report: Report,
    *,
    timeout_seconds: float,
    poll_seconds: float,
) -> bool:
    """Wait until these groups have their image, reporting each change. False if HyperPod had nothing to update.

    Raises UserError if an update failed, or at the timeout.
    """
    deadline, begun, polls = time.monotonic() + timeout_seconds, False, 0
    reported: dict[str, str] = {}
    while True:
        described = api.describe(client, cluster)
        if described is None:
            raise UserError(f"cluster {cluster} no longer exists", "create it again")
        chosen = [group for group in described["InstanceGroups"] if group["InstanceGroupName"] in groups]
        updating = described["ClusterStatus"] == "SystemUpdating" or any(map(_updating, chosen))
        begun, polls = begun or updating, polls + 1
        for group in chosen if begun else ():
            name, state = group["InstanceGroupName"], _state(group)
            if reported.get(name) != state:
                reported[name] = state
                report(f"{name}: {state}")
        if begun and not updating:
            if failed := [group["InstanceGroupName"] for group in chosen if _status(group) in _FAILED]:
                reason = described.get("FailureMessage") or "HyperPod gave no reason"
                raise UserError(
                    f"cluster {cluster}: {', '.join(failed)} not updated: {reason.rstrip('.')}",
                    "see `hyperpod-ft cluster logs`; the nodes keep or get back their previous image",
                )
            return True
        if not begun and polls >= POLLS_UNTIL_BEGUN:
            return False
        if time.monotonic() > deadline:
            raise UserError(
                f"cluster {cluster}: after {format_minutes(timeout_seconds)} still updating",
                "HyperPod continues; check with `hyperpod-ft cluster status`",
            )
        time.sleep(poll_seconds)


def _status(group: dict[str, Any]) -> str:
    return str(group.get("SoftwareUpdateStatus", ""))


def _updating(group: dict[str, Any]) -> bool:
    return _status(group) in _RUNNING or group.get("Status") == "SystemUpdating"


def _state(group: dict[str, Any]) -> str:
    done, of = group.get("TargetStateCount", 0), group.get("TargetCount", 0)
    image = group.get("DesiredImageReleaseVersion") or group.get("DesiredImageId") or ""
    return f"software update {_status(group) or 'requested'}, {done} of {of} have image {image}".rstrip()
