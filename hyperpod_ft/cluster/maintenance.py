"""Change a running cluster: its size, its nodes, their software.

Functions raise UserError; a `timeout` is in minutes, None means do not wait.
"""

from collections.abc import Sequence
from pathlib import Path

from hyperpod_ft.aws.checks.service_model import check_request
from hyperpod_ft.aws.stacks import reporter
from hyperpod_ft.cluster.access import ClusterAccess
from hyperpod_ft.cluster.config import stack_name
from hyperpod_ft.cluster.hyperpod import api, batches, instance_groups, software
from hyperpod_ft.cluster.hyperpod.nodes import Node, rebooting
from hyperpod_ft.cluster.hyperpod.software import NodeImage
from hyperpod_ft.cluster.hyperpod.waiting import Awaited
from hyperpod_ft.cluster.ssh.config import SshFiles
from hyperpod_ft.cluster.stack import stack
from hyperpod_ft.cluster.stack.stack import Remaining
from hyperpod_ft.errors import UserError


def instances_removed(access: ClusterAccess, group: str, count: int) -> int:
    """How many instances a group would lose."""
    with access.explained():
        return max(0, access.changeable(group).group(group).target - count)


def scale(access: ClusterAccess, group: str, count: int, timeout: float | None) -> None:
    with access.explained():
        cluster = access.changeable(group)
        before = cluster.group(group).target
        if count == before:
            access.report(f"{group}: has {count} instances already")
            return
        instance_groups.scale(access.sagemaker, cluster, group, count)
    access.report(f"{group}: requested {count} instances, had {before}")
    _wait_for(access, Awaited(targets={group: count}), timeout)


def delete_group(access: ClusterAccess, group: str, timeout: float | None) -> None:
    with access.explained():
        cluster = access.changeable(group)
        gone = [node.instance_id for node in access.nodes() if node.group == group]
        instance_groups.delete(access.sagemaker, cluster, group)
    access.report(f"{group}: deletion requested")
    _wait_for(access, Awaited(gone=frozenset(gone)), timeout)


def find_nodes(access: ClusterAccess, names: Sequence[str]) -> list[Node]:
    with access.explained():
        access.cluster()
        nodes = access.nodes()
    return [api.find_node(nodes, name) for name in dict.fromkeys(names)]


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
        cluster = access.changeable(*{node.group for node in nodes})
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
        cluster = access.changeable(*names)
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


def _ids(nodes: Sequence[Node]) -> frozenset[str]:
    return frozenset(node.instance_id for node in nodes)


def delete_cluster(access: ClusterAccess, *, delete_data: bool, timeout: float) -> Remaining:
    """Delete the cluster, wait, then delete its stack or reduce it to the data. Returns what remains.

    `timeout`: in minutes. Raises UserError. Safe to run again.
    """
    if delete_data and access.config is not None and access.config.existing is not None:
        raise UserError(
            "--delete-data: the file system and the bucket are your own (`existing`)",
            "leave --delete-data out; delete them with the AWS CLI",
        )
    remaining = _delete_and_wait(access, delete_data, timeout * 60)
    SshFiles(access.name, Path.home()).forget()
    return remaining


def _delete_and_wait(access: ClusterAccess, delete_data: bool, timeout_seconds: float) -> Remaining:
    name = stack_name(access.name)
    with access.explained():
        watch = access.watch()
        while True:
            watch.until_gone(timeout_seconds)
            try:
                remaining = stack.delete(access.session, name, reporter(name, access.report), delete_data=delete_data)
            except UserError as error:
                if api.find(access.sagemaker, access.name) is None:
                    raise
                access.report(f"{error.problem}: a cluster {access.name} has been created meanwhile")
                continue
            if api.find(access.sagemaker, access.name) is None:
                return remaining
