"""What only the controller knows: Slurm is asked for nodes without jobs, and what patching wipes there is backed up.

Through SSM. Functions raise what those of ClusterAccess do.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hyperpod_ft.cluster.access import ClusterAccess
from hyperpod_ft.cluster.hyperpod import api
from hyperpod_ft.cluster.hyperpod.api import GroupState, HyperPodCluster, Node, ssm_target, tally
from hyperpod_ft.cluster.ssh import ssm
from hyperpod_ft.errors import UserError

_BACKUP_SECONDS = 1200  # the dump of a large database takes minutes; SSM ends idle sessions after 20 (its default)
_STATES, _BACKUP = "hyperpod-ft-nodes:", "hyperpod-ft-backup:"


def nodes_without_jobs(access: ClusterAccess, group: str, count: int) -> list[Node]:
    """Nodes of a group that run no job, as Slurm on the controller reports them."""
    cluster, nodes = access.changeable(group), access.nodes()
    with _with_alternative("name the nodes to delete"):
        states = node_states(access.aws_cli, _controller(access, cluster, nodes))
    return without_jobs(cluster.group(group), nodes, states, count)


def back_up(access: ClusterAccess) -> None:
    """Copy what an update wipes on the controller to the shared volume."""
    cluster, nodes = access.cluster(), access.nodes()
    with _with_alternative("pass --no-backup"):
        target, mount_path = _controller(access, cluster, nodes), _mount_path(access)
        access.report("controller: backing up, which may take minutes")
        access.report(f"backup: {_back_up(access.aws_cli, target, mount_path)}")


# Slurm's states of a node without jobs, the first to go first; "planned" ones are about to run one
_WITHOUT_JOBS = ("down", "fail", "drained", "idle")


def without_jobs(group: GroupState, nodes: Sequence[Node], states: Mapping[str, str], count: int) -> list[Node]:
    """`count` nodes of a group that run no job, those that Slurm cannot use before idle ones, the newest first.

    Only nodes that are Running or have failed: the others are going already, or are not ready.
    `states`: Slurm's state by host name. Raises UserError if there are fewer, naming the others; and while more nodes
    run than the group should have, since HyperPod may list nodes as Running that it has begun to remove.
    """
    running = sum(node.group == group.name and node.running for node in nodes)
    if running > group.target:
        raise UserError(
            f"{group.name}: HyperPod is removing {running - group.target} of its {running} nodes",
            "run the command again once `hyperpod-ft cluster status --nodes` lists no more than the group should have",
        )
    in_group = [node for node in nodes if node.group == group.name and (node.running or node.failed)]
    free = [node for node in in_group if states.get(node.hostname) in _WITHOUT_JOBS]
    if len(free) < count:
        others = ", ".join(
            f"{node.instance_id} ({states.get(node.hostname, 'unknown to Slurm')})"
            for node in in_group
            if node not in free
        )
        raise UserError(
            f"{group.name}: {len(free)} of its nodes run no job, not {count}",
            f"wait, or name nodes whose jobs may be killed: {others or 'there are no others'}",
        )
    free.sort(key=lambda node: (_WITHOUT_JOBS.index(states[node.hostname]), -node.launched))
    return free[:count]


def node_states(aws_cli: ssm.AwsCli, target: str) -> dict[str, str]:
    """Slurm's state of every node by host name: idle, allocated, down, ... Raises UserError.

    Without the flags that sinfo appends, such as the `*` of a node that does not respond.
    """
    output = ssm.run(aws_cli, target, ssm.script_command(_script("node_states.sh")), _STATES)
    if output.startswith("failed:"):
        raise UserError(
            f"Slurm on the controller does not answer: {output.removeprefix('failed:').strip()}",
            "log in to the controller and check slurmctld",
        )
    states = (word.partition("=") for word in output.split())
    return {name: state.rstrip("*~#!%$@^-+") for name, _, state in states}


def _back_up(aws_cli: ssm.AwsCli, target: str, mount_path: str) -> str:
    """Copy Slurm's state and accounting database to the shared volume; returns what was copied. Raises UserError."""
    command = ssm.script_command(_script("back_up_slurm.sh"), mount_path)
    output = ssm.run(aws_cli, target, command, _BACKUP, attempts=1, seconds=_BACKUP_SECONDS)
    if output.startswith("failed:"):
        raise UserError(
            f"the controller could not be backed up: {output.removeprefix('failed:').strip()}",
            "log in with `hyperpod-ft cluster ssh --ssm`, and check slurmctld and the shared volume",
        )
    return output


def _script(name: str) -> Path:
    return Path(__file__).with_name(name)


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
    described = api.describe(access.sagemaker, access.name) or {}
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
