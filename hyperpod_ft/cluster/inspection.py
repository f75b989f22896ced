"""Look at a cluster: its state and its nodes, what HyperPod did to it, what its nodes logged. Nothing is changed.

Functions raise what those of ClusterAccess do.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from hyperpod_ft.cluster.access import ClusterAccess
from hyperpod_ft.cluster.hyperpod import api, events
from hyperpod_ft.cluster.hyperpod.api import INSTANCE_ID, HyperPodCluster, Node
from hyperpod_ft.cluster.hyperpod.events import Event
from hyperpod_ft.errors import UserError


@dataclass(frozen=True)
class ClusterOverview:
    """A cluster as it is."""

    cluster: HyperPodCluster
    nodes: list[Node]
    missing: dict[str, str]  # why groups have fewer instances than requested, by group, if HyperPod reports it
    warnings: dict[str, str]  # of the lifecycle scripts about Slurm, by instance id


def status(access: ClusterAccess) -> ClusterOverview:
    cluster, nodes = access.cluster(), access.nodes()
    missing = events.why_missing(access.sagemaker, cluster)
    warnings = events.slurm_warnings(access.session.client("logs"), cluster, nodes)
    return ClusterOverview(cluster, nodes, missing, warnings)


def newest_events(access: ClusterAccess, group: str | None, node: str | None, limit: int) -> list[Event]:
    """The newest events, the oldest of them first, with the reasons of what failed."""
    cluster = access.cluster()
    if not cluster.continuous:
        raise UserError(
            f"cluster {cluster.name} has no events: HyperPod keeps them with continuous provisioning only",
            "see `hyperpod-ft cluster status` and `hyperpod-ft cluster logs`",
        )
    if node and not INSTANCE_ID.fullmatch(node):  # HyperPod takes no other, and may have shut it down
        node = api.find_node(access.nodes(), node).instance_id
    found = events.newest(access.sagemaker, cluster.name, limit, group, node)
    if group and not found:
        cluster.group(group)
    return [events.with_reason(access.sagemaker, cluster.name, event) for event in reversed(found)]


def lifecycle_log(access: ClusterAccess, name: str | None, follow: bool) -> Iterator[str]:
    """The lines of a node's lifecycle log; without a name, of the node that wrote last."""
    cluster, logs = access.cluster(), access.session.client("logs")
    streams = events.lifecycle_logs(logs, cluster)
    if name is not None:
        named = [node for node in access.nodes() if name in (node.instance_id, node.hostname)]
        streams = [events.lifecycle_log(logs, cluster, node) for node in named] or [
            stream for stream in streams if stream.name.rpartition("/")[2] == name
        ]
    if not streams:
        whose = f"node {name!r}" if name else "any node"
        raise UserError(
            f"cluster {cluster.name}: no lifecycle log for {whose}",
            "list nodes with `hyperpod-ft cluster status --nodes`; a log appears a few minutes after its node starts",
        )
    access.report(f"{streams[0].group} {streams[0].name}")
    yield from streams[0].lines(follow=follow)
