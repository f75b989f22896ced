"""The nodes of a cluster, from ListClusterNodes."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hyperpod_ft.cluster.wait_for_change import Seen

RUNNING = "Running"
# botocore's pattern of an instance id, also within a sentence
INSTANCE_ID = re.compile(r"\bi-[0-9a-f]{8}(?:[0-9a-f]{9})?\b")


@dataclass(frozen=True)
class Node:
    """One instance. `status` is ClusterInstanceStatus: Running, Failure, Pending, ShuttingDown, SystemUpdating, ..."""

    group: str
    instance_id: str
    instance_type: str
    status: str
    message: str
    launched: float  # seconds since the epoch
    hostname: str  # ip-10-1-2-3, as Slurm names it; empty until HyperPod reports it
    logical_id: str = ""  # the same for each instance that HyperPod tries for this node

    @property
    def running(self) -> bool:
        return self.status == RUNNING

    @property
    def failed(self) -> bool:
        """Whether the instance failed. Without an instance id, capacity is missing, which HyperPod keeps requesting."""
        return self.status == "Failure" and bool(self.instance_id)


def list_nodes(client: Any, cluster: str) -> list[Node]:
    """Every node of a cluster, by group and id. `client` is boto3's for sagemaker.

    Includes nodes that have no instance yet. Reads all pages without a filter: InstanceGroupNameContains matches parts
    of names.
    """
    pages = client.get_paginator("list_cluster_nodes").paginate(ClusterName=cluster, IncludeNodeLogicalIds=True)
    found = [_node(summary) for page in pages for summary in page["ClusterNodeSummaries"]]
    return sorted(found, key=lambda node: (node.group, node.launched, node.instance_id))


def _node(summary: dict[str, Any]) -> Node:
    return Node(
        group=summary["InstanceGroupName"],
        # under continuous provisioning, a node that waits for capacity has no instance yet
        instance_id=summary.get("InstanceId", ""),
        instance_type=summary.get("InstanceType", ""),
        status=summary["InstanceStatus"]["Status"],
        message=summary["InstanceStatus"].get("Message", ""),
        launched=summary["LaunchTime"].timestamp() if "LaunchTime" in summary else 0.0,
        hostname=summary.get("PrivateDnsHostname", "").partition(".")[0],
        logical_id=summary.get("NodeLogicalId", ""),
    )


def rebooting(client: Any, cluster: str, requested: Sequence[Node]) -> Seen[list[Node]]:
    """How far the reboot of these nodes is; the state is what became of them, NotFound if HyperPod replaced one."""
    present = {node.instance_id: node for node in list_nodes(client, cluster)}
    now = [present.get(node.instance_id, replace(node, status="NotFound")) for node in requested]
    states = {f"{node.group} {node.instance_id}": node.status for node in now}
    changing = any(not (node.running or node.failed or node.status == "NotFound") for node in now)
    return Seen(now, states, begun=not all(node.running for node in now), changing=changing)


def ssm_target(cluster_id: str, node: Node) -> str:
    """The argument of `aws ssm start-session --target`."""
    return f"sagemaker-cluster:{cluster_id}_{node.group}-{node.instance_id}"


def tally(nodes: list[Node]) -> str:
    """The number of nodes in each state: `3 Running, 1 Pending`."""
    return ", ".join(f"{count} {status}" for status, count in sorted(Counter(node.status for node in nodes).items()))
