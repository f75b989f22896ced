"""Change a running cluster: its size, its nodes, their software.

Functions raise what those of ClusterAccess do; a `timeout` is in minutes, None means do not wait.

A software update gives nodes another image. HyperPod does not drain the nodes: it replaces their root volumes under
whatever runs there, and runs the lifecycle scripts again. If the nodes have the newest image already, it does nothing.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperpod_ft.aws.checks.service_model import check_request
from hyperpod_ft.cluster.access import ClusterAccess
from hyperpod_ft.cluster.config import stack_name
from hyperpod_ft.cluster.hyperpod import api, instance_groups
from hyperpod_ft.cluster.hyperpod.api import Node
from hyperpod_ft.cluster.hyperpod.waiting import Awaited, Seen
from hyperpod_ft.cluster.ssh.config import SshFiles
from hyperpod_ft.cluster.stack import stack
from hyperpod_ft.cluster.stack.stack import Remaining
from hyperpod_ft.errors import UserError

# what users lose; what is on the shared volume and in S3 stays
LOST_BY_UPDATE = (
    "their jobs are killed, and everything on their root volumes is lost: installed packages, container images"
)
LOST_WITH_CONTROLLER = "Slurm's queue and, unless it is external, the accounting database"
_UPDATING = ("Pending", "InProgress", "RollbackInProgress")  # SoftwareUpdateStatus
_UPDATE_FAILED = ("Failed", "RollbackComplete")


@dataclass(frozen=True)
class NodeImage:
    """An image of HyperPod's by its version, or any by its id; without both, HyperPod's newest."""

    version: str | None = None
    id: str | None = None  # ami-..., or `default`


def instances_removed(access: ClusterAccess, group: str, count: int) -> int:
    """How many instances a group would lose."""
    return max(0, access.changeable(group).group(group).target - count)


def scale(access: ClusterAccess, group: str, count: int, timeout: float | None) -> None:
    cluster = access.changeable(group)
    before = cluster.group(group).target
    if count == before:
        access.report(f"{group}: has {count} instances already")
        return
    instance_groups.scale(access.sagemaker, cluster, group, count)
    access.report(f"{group}: requested {count} instances, had {before}")
    access.wait(timeout, Awaited(targets={group: count}))


def delete_group(access: ClusterAccess, group: str, timeout: float | None) -> None:
    cluster = access.changeable(group)
    gone = [node.instance_id for node in access.nodes() if node.group == group]
    instance_groups.delete(access.sagemaker, cluster, group)
    access.report(f"{group}: deletion requested")
    access.wait(timeout, Awaited(gone=frozenset(gone)))


def find_nodes(access: ClusterAccess, names: Sequence[str]) -> list[Node]:
    access.cluster()
    nodes = access.nodes()
    return [api.find_node(nodes, name) for name in dict.fromkeys(names)]


def replace(access: ClusterAccess, nodes: list[Node], timeout: float | None) -> None:
    instance_groups.replace_nodes(access.sagemaker, access.cluster().name, nodes)
    _requested(access, "replacement", nodes)
    access.wait(timeout, Awaited(gone=_ids(nodes)))


def reboot(access: ClusterAccess, nodes: list[Node], timeout: float | None) -> None:
    instance_groups.reboot_nodes(access.sagemaker, access.cluster().name, nodes)
    _requested(access, "reboot", nodes)
    if timeout is None:
        return
    after, begun = access.wait_for_change(lambda: _reboot_progress(access, nodes), timeout, "status --nodes")
    if not begun:
        access.report("HyperPod has not shown the reboot: see in `sinfo` on the cluster whether it is over")
    elif lost := [node for node in after if not node.running]:
        raise UserError(
            ", ".join(f"{node.group} {node.instance_id} is {node.status}" for node in lost) + " after the reboot",
            "see `hyperpod-ft cluster status --nodes`; `hyperpod-ft cluster replace-node` gives it a new instance",
        )


def delete_nodes(access: ClusterAccess, nodes: list[Node], timeout: float | None) -> None:
    cluster = access.changeable(*{node.group for node in nodes})
    instance_groups.delete_nodes(access.sagemaker, cluster.name, nodes)
    _requested(access, "deletion", nodes)
    access.wait(timeout, Awaited(gone=_ids(nodes)))


def groups(access: ClusterAccess, names: Sequence[str]) -> list[str]:
    """These groups of a Slurm cluster, or all. Raises UserError for one that does not exist."""
    cluster = access.cluster()
    instance_groups.require_slurm(cluster)
    return [cluster.group(name).name for name in dict.fromkeys(names)] or [group.name for group in cluster.groups]


def workers(access: ClusterAccess, names: Sequence[str]) -> list[str]:
    """These groups, or all that run jobs. Raises UserError for the controller's, which never runs one, or if there
    are none."""
    cluster = access.changeable(*names)
    chosen = names or access.group_roles(cluster).workers
    if not chosen:
        raise UserError(
            f"cluster {cluster.name} has no group of workers",
            "add one to the cluster file and run `cluster create`",
        )
    return list(dict.fromkeys(chosen))


def has_controller(access: ClusterAccess, groups: Sequence[str]) -> bool:
    return access.group_roles(access.cluster()).controller in groups


def check_image(access: ClusterAccess, groups: Sequence[str], image: NodeImage) -> None:
    """Raises UserError for an image that the service's model does not allow."""
    for path, problem in check_request(
        "sagemaker", "UpdateClusterSoftware", _update_request(access.name, groups, image)
    ):
        option = "--image" if path == "ImageId" else "--release"
        raise UserError(f"{option}: {problem}", "pass ami-... or `default`, or a release such as 1.2.3")


def update(access: ClusterAccess, groups: Sequence[str], image: NodeImage, timeout: float | None) -> None:
    access.sagemaker.update_cluster_software(**_update_request(access.name, groups, image))
    access.report(f"{', '.join(groups)}: software update requested")
    if timeout is None:
        return
    described, begun = access.wait_for_change(
        lambda: _update_progress(access.sagemaker, access.name, groups), timeout, "status"
    )
    if begun:
        _check_updated(described, groups)
        access.wait(timeout, Awaited())
    else:
        access.report("HyperPod updates nothing: the nodes have this image already")


def set_auto_patch(access: ClusterAccess, groups: Sequence[str], strategy: str) -> None:
    instance_groups.set_auto_patch(access.sagemaker, access.cluster(), groups, strategy)
    access.report(f"{', '.join(groups)}: HyperPod patches nodes by itself: {strategy}")


def set_node_recovery(access: ClusterAccess, mode: str) -> None:
    instance_groups.set_node_recovery(access.sagemaker, access.cluster(), mode)
    access.report(f"node recovery: {mode}")


def _requested(access: ClusterAccess, what: str, nodes: Sequence[Node]) -> None:
    for node in nodes:
        access.report(f"{node.group} {node.instance_id}: {what} requested")


def _ids(nodes: Sequence[Node]) -> frozenset[str]:
    return frozenset(node.instance_id for node in nodes)


def delete_cluster(access: ClusterAccess, *, delete_data: bool, timeout: float) -> Remaining:
    """Delete the cluster, wait, then delete its stack or reduce it to the data. Returns what remains.

    Safe to run again.
    """
    if delete_data and access.config is not None and access.config.existing is not None:
        raise UserError(
            "--delete-data: the file system and the bucket are your own (`existing`)",
            "leave --delete-data out; delete them with the AWS CLI",
        )
    name, watch = stack_name(access.name), access.watch()
    while True:
        watch.until_gone(timeout * 60)
        try:
            remaining = stack.delete(access.session, name, access.report, delete_data=delete_data)
        except UserError as error:
            if api.find(access.sagemaker, access.name) is None:
                raise
            access.report(f"{error.problem}: a cluster {access.name} has been created meanwhile")
            continue
        if api.find(access.sagemaker, access.name) is None:
            break
    SshFiles(access.name, Path.home()).forget()
    return remaining


def _reboot_progress(access: ClusterAccess, requested: Sequence[Node]) -> Seen[list[Node]]:
    """How far the reboot of these nodes is; the state is what became of them, NotFound if HyperPod replaced one."""
    present = {node.instance_id: node for node in access.nodes()}
    now = [present.get(node.instance_id, dataclasses.replace(node, status="NotFound")) for node in requested]
    states = {f"{node.group} {node.instance_id}": node.status for node in now}
    changing = any(not (node.running or node.failed or node.status == "NotFound") for node in now)
    return Seen(now, states, begun=not all(node.running for node in now), changing=changing)


def _update_request(cluster: str, groups: Sequence[str], image: NodeImage) -> dict[str, Any]:
    """The request of `UpdateClusterSoftware` for these groups."""
    version = {"ImageReleaseVersion": image.version} if image.version else {}
    request: dict[str, Any] = {
        "ClusterName": cluster,
        "InstanceGroups": [{"InstanceGroupName": name, **version} for name in groups],
    }
    if image.id:
        request["ImageId"] = image.id
    return request


def _update_progress(client: Any, cluster: str, groups: Sequence[str]) -> Seen[dict[str, Any]]:
    """How far the update of these groups is; the state is DescribeCluster's answer. Raises UserError."""
    described = api.describe(client, cluster)
    if described is None:
        raise UserError(f"cluster {cluster} no longer exists", "create it again")
    chosen = _chosen(described, groups)
    updating = described["ClusterStatus"] == "SystemUpdating" or any(map(_updating, chosen))
    states = {group["InstanceGroupName"]: _update_state(group) for group in chosen}
    return Seen(described, states, begun=updating, changing=updating)


def _check_updated(described: dict[str, Any], groups: Sequence[str]) -> None:
    """Raises UserError if the update of one of these groups failed."""
    if failed := [
        group["InstanceGroupName"] for group in _chosen(described, groups) if _update_status(group) in _UPDATE_FAILED
    ]:
        reason = described.get("FailureMessage") or "HyperPod gave no reason"
        raise UserError(
            f"cluster {described['ClusterName']}: {', '.join(failed)} not updated: {reason.rstrip('.')}",
            "see `hyperpod-ft cluster logs`; the nodes keep or get back their previous image",
        )


def _chosen(described: dict[str, Any], groups: Sequence[str]) -> list[dict[str, Any]]:
    return [group for group in described["InstanceGroups"] if group["InstanceGroupName"] in groups]


def _update_status(group: dict[str, Any]) -> str:
    return str(group.get("SoftwareUpdateStatus", ""))


def _updating(group: dict[str, Any]) -> bool:
    return _update_status(group) in _UPDATING or group.get("Status") == "SystemUpdating"


def _update_state(group: dict[str, Any]) -> str:
    done, of = group.get("TargetStateCount", 0), group.get("TargetCount", 0)
    image = group.get("DesiredImageReleaseVersion") or group.get("DesiredImageId") or ""
    return f"software update {_update_status(group) or 'requested'}, {done} of {of} have image {image}".rstrip()
