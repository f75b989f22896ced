"""Change a running cluster: its size, its nodes, their software.

Functions raise UserError; a `timeout` is in minutes, None means do not wait.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hyperpod_ft.aws.cluster.access import ClusterAccess
from hyperpod_ft.aws.cluster.idle_nodes import without_jobs
from hyperpod_ft.aws.hyperpod import api, batches, instance_groups, software
from hyperpod_ft.aws.hyperpod.api import HyperPodCluster
from hyperpod_ft.aws.hyperpod.nodes import Node, rebooting, ssm_target, tally
from hyperpod_ft.aws.hyperpod.software import NodeImage
from hyperpod_ft.aws.hyperpod.waiting import Awaited
from hyperpod_ft.aws.ssh import controller
from hyperpod_ft.aws.validation.service_model import check_request
from hyperpod_ft.errors import UserError


def instances_removed(access: ClusterAccess, group: str, count: int) -> int:
    """How many instances a group would lose."""
    with access.explained():
        return max(0, _changeable(access, group).group(group).target - count)


def scale(access: ClusterAccess, group: str, count: int, timeout: float | None) -> None:
    with access.explained():
        cluster = _changeable(access, group)
        before = cluster.group(group).target
        if count == before:
            access.report(f"{group}: has {count} instances already")
            return
        instance_groups.scale(access.sagemaker, cluster, group, count)
    access.report(f"{group}: requested {count} instances, had {before}")
    _wait_for(access, Awaited(targets={group: count}), timeout)


def delete_group(access: ClusterAccess, group: str, timeout: float | None) -> None:
    with access.explained():
        cluster = _changeable(access, group)
        gone = [node.instance_id for node in access.nodes() if node.group == group]
        instance_groups.delete(access.sagemaker, cluster, group)
    access.report(f"{group}: deletion requested")
    _wait_for(access, Awaited(gone=frozenset(gone)), timeout)


def find_nodes(access: ClusterAccess, names: Sequence[str]) -> list[Node]:
    with access.explained():
        access.cluster()
        nodes = access.nodes()
    return [api.find_node(nodes, name) for name in dict.fromkeys(names)]


def nodes_without_jobs(access: ClusterAccess, group: str, count: int) -> list[Node]:
    """Nodes of a group that run no job, as Slurm on the controller reports them."""
    with access.explained():
        cluster, nodes = _changeable(access, group), access.nodes()
        with _with_alternative("name the nodes to delete"):
            states = controller.node_states(access.aws_cli, _controller(access, cluster, nodes))
    return without_jobs(cluster.group(group), nodes, states, count)


def replace(access: ClusterAccess, nodes: list[Node], timeout: float | None) -> None:
    with access.explained():
        batches.replace(access.sagemaker, access.cluster().name, nodes)
    _requested(access, "replacement", nodes)
    _wait_for(access, Awaited(gone=_ids(nodes)), timeout)


def reboot(access: ClusterAccess, nodes: list[Node], timeout: float | None) -> None:
    with access.explained():
        batches.reboot(access.sagemaker, access.cluster().name, nodes)
    _requested(access, "reboot", nodes)
    if timeout is None:
        return
    after, begun = access.wait_for_change(lambda: rebooting(access.sagemaker, access.name, nodes), timeout, "nodes")
    if not begun:
        access.report("HyperPod has not shown the reboot: see in `sinfo` on the cluster whether it is over")
    elif lost := [node for node in after if not node.running]:
        raise UserError(
            ", ".join(f"{node.group} {node.instance_id} is {node.status}" for node in lost) + " after the reboot",
            "see `hyperpod-ft cluster nodes`; `hyperpod-ft cluster replace-node` gives it a new instance",
        )


def delete_nodes(access: ClusterAccess, nodes: list[Node], timeout: float | None) -> None:
    with access.explained():
        cluster = _changeable(access, *{node.group for node in nodes})
        batches.delete(access.sagemaker, cluster.name, nodes)
    _requested(access, "deletion", nodes)
    _wait_for(access, Awaited(gone=_ids(nodes)), timeout)


def groups(access: ClusterAccess, names: Sequence[str]) -> list[str]:
    """These groups of a Slurm cluster, or all. Raises UserError for one that does not exist."""
    with access.explained():
        cluster = access.cluster()
    instance_groups.require_slurm(cluster)
    return [cluster.group(name).name for name in dict.fromkeys(names)] or [group.name for group in cluster.groups]


def workers(access: ClusterAccess, names: Sequence[str]) -> list[str]:
    """These groups, or all that run jobs. Raises UserError for the controller's, which never runs one, or if there
    are none."""
    with access.explained():
        cluster = _changeable(access, *names)
    chosen = names or access.group_roles(cluster).workers
    if not chosen:
        raise UserError(
            f"cluster {cluster.name} has no group of workers",
            "add one to the cluster file and run `cluster create`",
        )
    return list(dict.fromkeys(chosen))


def has_controller(access: ClusterAccess, groups: Sequence[str]) -> bool:
    with access.explained():
        cluster = access.cluster()
    return access.group_roles(cluster).controller in groups


def back_up(access: ClusterAccess) -> None:
    """Copy what an update wipes on the controller to the shared volume."""
    with access.explained():
        cluster, nodes = access.cluster(), access.nodes()
        with _with_alternative("pass --no-backup"):
            target, mount_path = _controller(access, cluster, nodes), _mount_path(access)
            access.report("controller: backing up, which may take minutes")
            access.report(f"backup: {controller.back_up(access.aws_cli, target, mount_path)}")


def check_image(access: ClusterAccess, groups: Sequence[str], image: NodeImage) -> None:
    """Raises UserError for an image that the service's model does not allow."""
    for path, problem in check_request(
        "sagemaker", "UpdateClusterSoftware", software.update_request(access.name, groups, image)
    ):
        option = "--image" if path == "ImageId" else "--release"
        raise UserError(f"{option}: {problem}", "pass ami-... or `default`, or a release such as 1.2.3")


def update(access: ClusterAccess, groups: Sequence[str], image: NodeImage, timeout: float | None) -> None:
    with access.explained():
        access.sagemaker.update_cluster_software(**software.update_request(access.name, groups, image))
        access.report(f"{', '.join(groups)}: software update requested")
    if timeout is None:
        return
    described, begun = access.wait_for_change(
        lambda: software.progress(access.sagemaker, access.name, groups), timeout, "status"
    )
    if begun:
        software.check_updated(described, groups)
        access.wait(timeout, Awaited())
    else:
        access.report("HyperPod updates nothing: the nodes have this image already")


def set_auto_patch(access: ClusterAccess, groups: Sequence[str], strategy: str) -> None:
    with access.explained():
        instance_groups.set_auto_patch(access.sagemaker, access.cluster(), groups, strategy)
    access.report(f"{', '.join(groups)}: HyperPod patches nodes by itself: {strategy}")


def set_node_recovery(access: ClusterAccess, mode: str) -> None:
    with access.explained():
        instance_groups.set_node_recovery(access.sagemaker, access.cluster(), mode)
    access.report(f"node recovery: {mode}")


def _wait_for(access: ClusterAccess, awaited: Awaited, timeout: float | None) -> None:
    if timeout is not None:
        access.wait(timeout, awaited)


def _requested(access: ClusterAccess, what: str, nodes: Sequence[Node]) -> None:
    for node in nodes:
        access.report(f"{node.group} {node.instance_id}: {what} requested")


def _changeable(access: ClusterAccess, *groups: str) -> HyperPodCluster:
    """The cluster. Raises UserError if it has no such groups, or if one is the controller's."""
    cluster = access.cluster()
    for group in groups:
        if cluster.group(group).name == access.group_roles(cluster).controller:
            raise UserError(f"{group} is the controller group, which always has one instance", "name another group")
    return cluster


def _controller(access: ClusterAccess, cluster: HyperPodCluster, nodes: list[Node]) -> str:
    """SSM's target of the controller. Raises UserError if it is not Running."""
    controller = access.group_roles(cluster).controller
    if controller is None:
        raise UserError(f"{cluster.name}: no controller group found", "pass the cluster file, which names it")
    in_group = [node for node in nodes if node.group == controller]
    for node in in_group:
        if node.running:
            return ssm_target(cluster.id, node)
    state = tally(in_group) or "it has no instance"
    raise UserError(f"{cluster.name}: the controller is not Running ({state})", "wait until it is")


def _mount_path(access: ClusterAccess) -> str:
    """Where the shared volume is: by the cluster file, or as HyperPod mounts it."""
    if access.config:
        return access.config.fsx.mount_path
    described: dict[str, Any] = access.description()
    for group in described.get("InstanceGroups", []):
        for storage in group.get("InstanceStorageConfigs", []):
            if path := storage.get("FsxLustreConfig", {}).get("MountPath"):
                return str(path)
    return "/fsx"


@contextmanager
def _with_alternative(alternative: str) -> Iterator[None]:
    """Where the controller cannot be asked, errors also name the way that does without it."""
    try:
        yield
    except UserError as error:
        raise UserError(error.problem, f"{error.remedy}, or {alternative}") from error


def _ids(nodes: Sequence[Node]) -> frozenset[str]:
    return frozenset(node.instance_id for node in nodes)
