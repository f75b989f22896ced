"""Calls to SageMaker HyperPod: a cluster, and its nodes. `client` is boto3's for sagemaker throughout."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from hyperpod_ft.aws.session import answer_or_none, error_code, paged
from hyperpod_ft.cluster.config import ClusterConfig
from hyperpod_ft.errors import UserError, did_you_mean

RUNNING = "Running"
# botocore's pattern of an instance id, also within a sentence
INSTANCE_ID = re.compile(r"\bi-[0-9a-f]{8}(?:[0-9a-f]{9})?\b")
IN_SERVICE, FAILED, DELETING = "InService", "Failed", "Deleting"


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
    wanted = {"ClusterName": cluster, "IncludeNodeLogicalIds": True}
    found = map(_node, paged(client, "list_cluster_nodes", "ClusterNodeSummaries", **wanted))
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


def ssm_target(cluster_id: str, node: Node) -> str:
    """The argument of `aws ssm start-session --target`."""
    return f"sagemaker-cluster:{cluster_id}_{node.group}-{node.instance_id}"


def tally(nodes: list[Node]) -> str:
    """The number of nodes in each state: `3 Running, 1 Pending`."""
    return ", ".join(f"{count} {status}" for status, count in sorted(Counter(node.status for node in nodes).items()))


@dataclass(frozen=True)
class GroupState:
    """An instance group. While it scales, `current` differs from `target`, regardless of the cluster's status."""

    name: str
    instance_type: str
    current: int
    target: int
    status: str  # InstanceGroupStatus; empty where HyperPod reports none
    lifecycle_uri: str
    node_type: str  # Controller, Login or Compute; empty under legacy provisioning


@dataclass(frozen=True)
class HyperPodCluster:
    """A cluster, from DescribeCluster. `status` is ClusterStatus: Creating, InService, Failed, ..."""

    name: str
    arn: str
    status: str
    failure: str
    groups: tuple[GroupState, ...]
    subnets: tuple[str, ...]
    kubernetes: bool  # orchestrated by EKS, not Slurm
    continuous: bool = False  # HyperPod keeps trying to launch instances, and keeps events

    @property
    def id(self) -> str:
        return self.arn.rpartition("/")[2]

    @property
    def complete(self) -> bool:
        """Whether it is in service and every group has its target number of instances."""
        return self.status == IN_SERVICE and all(group.current == group.target for group in self.groups)

    def group(self, name: str) -> GroupState:
        """Raises UserError if there is no such group."""
        for group in self.groups:
            if group.name == name:
                return group
        known = [group.name for group in self.groups]
        raise UserError(
            f"cluster {self.name}: no instance group {name!r}" + did_you_mean(name, known), f"known: {', '.join(known)}"
        )


def describe(client: Any, name: str) -> dict[str, Any] | None:
    """DescribeCluster's answer; None if no cluster has this name."""
    return answer_or_none(client.describe_cluster, "ResourceNotFound", ClusterName=name)


def find(client: Any, name: str) -> HyperPodCluster | None:
    """The cluster; None if no cluster has this name."""
    described = describe(client, name)
    return None if described is None else of_description(described)


def require(client: Any, name: str) -> HyperPodCluster:
    """The cluster. Raises UserError if no cluster has this name."""
    if cluster := find(client, name):
        return cluster
    names = [summary["ClusterName"] for summary in paged(client, "list_clusters", "ClusterSummaries")]
    known = f"existing: {', '.join(sorted(names))}" if names else "there are no clusters"
    region = client.meta.region_name
    raise UserError(
        f"no cluster {name!r} in {region}" + did_you_mean(name, names), f"{known}; for another region pass --region"
    )


def not_ours(cluster: HyperPodCluster, subnet_id: str) -> str:
    """Why a cluster cannot be the one that this kit created on this subnet; empty if it can be."""
    if cluster.kubernetes:
        return f"cluster {cluster.name} already exists and uses Kubernetes (EKS), not Slurm"
    if subnet_id not in cluster.subnets:
        return f"cluster {cluster.name} already exists on other subnets: this cluster file did not create it"
    return ""


def delete(client: Any, name: str) -> bool:
    """Request deletion; False if HyperPod refuses because the cluster is changing."""
    try:
        client.delete_cluster(ClusterName=name)
    except client.exceptions.ClientError as error:
        if error_code(error) == "ConflictException":
            return False
        if error_code(error) != "ResourceNotFound":
            raise
    return True


def find_node(nodes: list[Node], wanted: str) -> Node:
    """The node of this instance id or host name. Raises UserError if it does not exist."""
    for node in nodes:
        if wanted and wanted in (node.instance_id, node.hostname):
            return node
    known = [node.instance_id for node in nodes if node.instance_id]
    raise UserError(
        f"no node {wanted!r}" + did_you_mean(wanted, known),
        "give an instance id or host name from `hyperpod-ft cluster status --nodes`",
    )


def of_description(described: dict[str, Any]) -> HyperPodCluster:
    """The cluster that `DescribeCluster` describes."""
    return HyperPodCluster(
        name=described["ClusterName"],
        arn=described["ClusterArn"],
        status=described["ClusterStatus"],
        failure=described.get("FailureMessage", ""),
        groups=tuple(
            GroupState(
                name=group["InstanceGroupName"],
                instance_type=group.get("InstanceType", ""),
                current=group.get("CurrentCount", 0),
                target=group.get("TargetCount", 0),
                status=group.get("Status", ""),
                lifecycle_uri=group.get("LifeCycleConfig", {}).get("SourceS3Uri", ""),
                node_type=group.get("SlurmConfig", {}).get("NodeType", ""),
            )
            for group in described["InstanceGroups"]
        ),
        subnets=tuple(described.get("VpcConfig", {}).get("Subnets", [])),
        kubernetes="Eks" in described.get("Orchestrator", {}),
        continuous=described.get("NodeProvisioningMode") == "Continuous",
    )


# of AWS's scripts and this kit's example
_USUAL_NAMES = {"controller-machine": "Controller", "login-group": "Login"}


@dataclass(frozen=True)
class GroupRoles:
    """Names of instance groups; None where the cluster has no such group, or none can be recognized."""

    controller: str | None
    login: str | None
    workers: tuple[str, ...]

    @classmethod
    def of(cls, cluster: HyperPodCluster, config: ClusterConfig | None) -> "GroupRoles":
        """HyperPod reports roles only for clusters whose Slurm it set up; for others names decide: those of the
        cluster file, or the usual ones."""
        named = _USUAL_NAMES if config is None else _names_in(config)
        roles = [(group.node_type or named.get(group.name, "Compute"), group.name) for group in cluster.groups]
        controllers, logins, workers = (
            tuple(name for role, name in roles if role == wanted) for wanted in ("Controller", "Login", "Compute")
        )
        return cls(next(iter(controllers), None), next(iter(logins), None), workers)

    @property
    def entry(self) -> str | None:
        """The group that users log in to: the login group, or the controller if there is none."""
        return self.login or self.controller


def _names_in(config: ClusterConfig) -> dict[str, str]:
    return {config.controller.name: "Controller"} | ({config.login.name: "Login"} if config.login else {})
