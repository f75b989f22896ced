"""The operations of `hyperpod-ft cluster` that change a running cluster: its size, its nodes, their software."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hyperpod_ft.aws.cluster.access import ClusterAccess
from hyperpod_ft.aws.cluster.idle_nodes import without_jobs
from hyperpod_ft.aws.hyperpod import api, batches, instance_groups, software
from hyperpod_ft.aws.hyperpod.api import Cluster
from hyperpod_ft.aws.hyperpod.group_roles import Roles
from hyperpod_ft.aws.hyperpod.nodes import Node, rebooting, ssm_target, tally
from hyperpod_ft.aws.hyperpod.software import NodeImage
from hyperpod_ft.aws.hyperpod.waiting import Awaited
from hyperpod_ft.aws.ssh import controller
from hyperpod_ft.aws.validation.service_model import check_request
from hyperpod_ft.errors import UserError


@dataclass(frozen=True)
class Maintenance:
    """The changes to one cluster. Methods raise UserError; durations are in minutes, None means do not wait."""

    access: ClusterAccess

    def instances_removed(self, group: str, count: int) -> int:
        """How many instances a group would lose."""
        with self.access.explained():
            return max(0, self._changeable(group).group(group).target - count)

    def scale(self, group: str, count: int, timeout: float | None) -> None:
        with self.access.explained():
            cluster = self._changeable(group)
            before = cluster.group(group).target
            if count == before:
                self.access.report(f"{group}: has {count} instances already")
                return
            instance_groups.scale(self.access.sagemaker, cluster, group, count)
        self.access.report(f"{group}: requested {count} instances, had {before}")
        self._wait_for(Awaited(targets={group: count}), timeout)

    def delete_group(self, group: str, timeout: float | None) -> None:
        with self.access.explained():
            cluster = self._changeable(group)
            gone = [node.instance_id for node in self.access.nodes() if node.group == group]
            instance_groups.delete(self.access.sagemaker, cluster, group)
        self.access.report(f"{group}: deletion requested")
        self._wait_for(Awaited(gone=frozenset(gone)), timeout)

    def find_nodes(self, names: Sequence[str]) -> list[Node]:
        with self.access.explained():
            self.access.cluster()
            nodes = self.access.nodes()
        return [api.find_node(nodes, name) for name in dict.fromkeys(names)]

    def nodes_without_jobs(self, group: str, count: int) -> list[Node]:
        """Nodes of a group that run no job, as Slurm on the controller reports them."""
        with self.access.explained():
            cluster, nodes = self._changeable(group), self.access.nodes()
            with _with_alternative("name the nodes to delete"):
                states = controller.node_states(self.access.aws_cli, self._controller(cluster, nodes))
        return without_jobs(cluster.group(group), nodes, states, count)

    def replace(self, nodes: list[Node], timeout: float | None) -> None:
        with self.access.explained():
            batches.replace(self.access.sagemaker, self.access.cluster().name, nodes)
        self._requested("replacement", nodes)
        self._wait_for(Awaited(gone=_ids(nodes)), timeout)

    def reboot(self, nodes: list[Node], timeout: float | None) -> None:
        with self.access.explained():
            batches.reboot(self.access.sagemaker, self.access.cluster().name, nodes)
        self._requested("reboot", nodes)
        if timeout is None:
            return
        after, begun = self.access.wait_for_change(
            lambda: rebooting(self.access.sagemaker, self.access.name, nodes), timeout, "nodes"
        )
        if not begun:
            self.access.report("HyperPod has not shown the reboot: see in `sinfo` on the cluster whether it is over")
        elif lost := [node for node in after if not node.running]:
            raise UserError(
                ", ".join(f"{node.group} {node.instance_id} is {node.status}" for node in lost) + " after the reboot",
                "see `hyperpod-ft cluster nodes`; `hyperpod-ft cluster replace-node` gives it a new instance",
            )

    def delete_nodes(self, nodes: list[Node], timeout: float | None) -> None:
        with self.access.explained():
            cluster = self._changeable(*{node.group for node in nodes})
            batches.delete(self.access.sagemaker, cluster.name, nodes)
        self._requested("deletion", nodes)
        self._wait_for(Awaited(gone=_ids(nodes)), timeout)

    def groups(self, names: Sequence[str]) -> list[str]:
        """These groups of a Slurm cluster, or all. Raises UserError for one that does not exist."""
        with self.access.explained():
            cluster = self.access.cluster()
        instance_groups.require_slurm(cluster)
        return [cluster.group(name).name for name in dict.fromkeys(names)] or [group.name for group in cluster.groups]

    def workers(self, names: Sequence[str]) -> list[str]:
        """These groups, or all that run jobs. Raises UserError for the controller's, which never runs one, or if there
        are none."""
        with self.access.explained():
            cluster = self._changeable(*names)
        chosen = names or self._roles(cluster).workers
        if not chosen:
            raise UserError(
                f"cluster {cluster.name} has no group of workers",
                "add one to the cluster file and run `cluster create`",
            )
        return list(dict.fromkeys(chosen))

    def has_controller(self, groups: Sequence[str]) -> bool:
        with self.access.explained():
            cluster = self.access.cluster()
        return self._roles(cluster).controller in groups

    def back_up(self) -> None:
        """Copy what an update wipes on the controller to the shared volume."""
        with self.access.explained():
            cluster, nodes = self.access.cluster(), self.access.nodes()
            with _with_alternative("pass --no-backup"):
                target, mount_path = self._controller(cluster, nodes), self._mount_path()
                self.access.report("controller: backing up, which may take minutes")
                self.access.report(f"backup: {controller.back_up(self.access.aws_cli, target, mount_path)}")

    def check_image(self, groups: Sequence[str], image: NodeImage) -> None:
        """Raises UserError for an image that the service's model does not allow."""
        for path, problem in check_request(
            "sagemaker", "UpdateClusterSoftware", software.update_request(self.access.name, groups, image)
        ):
            option = "--image" if path == "ImageId" else "--release"
            raise UserError(f"{option}: {problem}", "pass ami-... or `default`, or a release such as 1.2.3")

    def update(self, groups: Sequence[str], image: NodeImage, timeout: float | None) -> None:
        with self.access.explained():
            self.access.sagemaker.update_cluster_software(**software.update_request(self.access.name, groups, image))
            self.access.report(f"{', '.join(groups)}: software update requested")
        if timeout is None:
            return
        described, begun = self.access.wait_for_change(
            lambda: software.progress(self.access.sagemaker, self.access.name, groups), timeout, "status"
        )
        if begun:
            software.check_updated(described, groups)
            self.access.wait(timeout, Awaited())
        else:
            self.access.report("HyperPod updates nothing: the nodes have this image already")

    def set_auto_patch(self, groups: Sequence[str], strategy: str) -> None:
        with self.access.explained():
            instance_groups.set_auto_patch(self.access.sagemaker, self.access.cluster(), groups, strategy)
        self.access.report(f"{', '.join(groups)}: HyperPod patches nodes by itself: {strategy}")

    def set_node_recovery(self, mode: str) -> None:
        with self.access.explained():
            instance_groups.set_node_recovery(self.access.sagemaker, self.access.cluster(), mode)
        self.access.report(f"node recovery: {mode}")

    def _wait_for(self, awaited: Awaited, timeout: float | None) -> None:
        if timeout is not None:
            self.access.wait(timeout, awaited)

    def _requested(self, what: str, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self.access.report(f"{node.group} {node.instance_id}: {what} requested")

    def _changeable(self, *groups: str) -> Cluster:
        """The cluster. Raises UserError if it has no such groups, or if one is the controller's."""
        cluster = self.access.cluster()
        for group in groups:
            if cluster.group(group).name == self._roles(cluster).controller:
                raise UserError(f"{group} is the controller group, which always has one instance", "name another group")
        return cluster

    def _roles(self, cluster: Cluster) -> Roles:
        return Roles.of(cluster, self.access.config)

    def _controller(self, cluster: Cluster, nodes: list[Node]) -> str:
        """SSM's target of the controller. Raises UserError if it is not Running."""
        controller = self._roles(cluster).controller
        if controller is None:
            raise UserError(f"{cluster.name}: no controller group found", "pass the cluster file, which names it")
        in_group = [node for node in nodes if node.group == controller]
        for node in in_group:
            if node.running:
                return ssm_target(cluster.id, node)
        state = tally(in_group) or "it has no instance"
        raise UserError(f"{cluster.name}: the controller is not Running ({state})", "wait until it is")

    def _mount_path(self) -> str:
        """Where the shared volume is: by the cluster file, or as HyperPod mounts it."""
        if self.access.config:
            return self.access.config.fsx.mount_path
        described: dict[str, Any] = self.access.description()
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
