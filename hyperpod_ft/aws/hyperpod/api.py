"""What the kit asks of HyperPod, and what it answers. `client` is boto3's for sagemaker everywhere."""

from dataclasses import dataclass
from typing import Any

from hyperpod_ft.aws.hyperpod.nodes import Node
from hyperpod_ft.aws.hyperpod.requests import group_specification
from hyperpod_ft.aws.session import error_code
from hyperpod_ft.errors import UserError, did_you_mean

IN_SERVICE, FAILED, DELETING = "InService", "Failed", "Deleting"
_MOST_REPLACED = 25  # BatchReplaceClusterNodesRequestNodeIdsList


@dataclass(frozen=True)
class Group:
    """An instance group. While it scales, `current` differs from `target`, whatever the cluster's status says."""

    name: str
    instance_type: str
    current: int
    target: int
    status: str  # InstanceGroupStatus; empty where HyperPod gives none
    lifecycle_uri: str
    node_type: str  # Controller, Login or Compute; empty under legacy provisioning


@dataclass(frozen=True)
class Cluster:
    """A cluster as DescribeCluster tells of it. `status` is ClusterStatus: Creating, InService, Failed, ..."""

    name: str
    arn: str
    status: str
    failure: str
    groups: tuple[Group, ...]
    subnets: tuple[str, ...]
    kubernetes: bool  # orchestrated by EKS, not Slurm

    @property
    def id(self) -> str:
        return self.arn.rpartition("/")[2]

    @property
    def complete(self) -> bool:
        """Every group has the nodes it is to have."""
        return self.status == IN_SERVICE and all(group.current == group.target for group in self.groups)

    def group(self, name: str) -> Group:
        """Raises UserError when there is no such group."""
        for group in self.groups:
            if group.name == name:
                return group
        known = [group.name for group in self.groups]
        raise UserError(
            f"cluster {self.name}: no instance group {name!r}" + did_you_mean(name, known), f"known: {', '.join(known)}"
        )


def describe(client: Any, name: str) -> dict[str, Any] | None:
    """What DescribeCluster says; None where there is no cluster of this name."""
    try:
        described: dict[str, Any] = client.describe_cluster(ClusterName=name)
    except client.exceptions.ClientError as error:
        if error_code(error) == "ResourceNotFound":
            return None
        raise
    return described


def find(client: Any, name: str) -> Cluster | None:
    """The cluster, or None when there is none of this name."""
    described = describe(client, name)
    return None if described is None else of_description(described)


def require(client: Any, name: str) -> Cluster:
    """The cluster. Raises UserError when there is none of this name."""
    if cluster := find(client, name):
        return cluster
    names = [
        summary["ClusterName"]
        for page in client.get_paginator("list_clusters").paginate()
        for summary in page["ClusterSummaries"]
    ]
    known = f"clusters there: {', '.join(sorted(names))}" if names else "there is no cluster at all"
    region = client.meta.region_name
    raise UserError(f"no cluster {name!r} in {region}" + did_you_mean(name, names), f"{known}; other regions: --region")


def not_ours(cluster: Cluster, subnet_id: str) -> str:
    """Why a cluster cannot be the one that the kit makes on this subnet; empty when it can be."""
    if cluster.kubernetes:
        return f"there is a cluster {cluster.name} already, and it is Kubernetes (EKS), not Slurm"
    if subnet_id not in cluster.subnets:
        return f"there is a cluster {cluster.name} already, and it stands on other subnets: somebody else made it"
    return ""


def scale(client: Any, cluster: Cluster, group: str, count: int) -> None:
    """Have a group hold `count` instances. Whatever else the group is, it stays. Raises UserError under Kubernetes."""
    if cluster.kubernetes:
        raise UserError(
            f"cluster {cluster.name} is Kubernetes (EKS): its groups hold what this kit does not know",
            "use the AWS CLI",
        )
    described = describe(client, cluster.name)
    if described is None:
        raise UserError(f"cluster {cluster.name}: is gone", "look at `hyperpod-ft cluster status`")
    there = {one["InstanceGroupName"]: group_specification(one) for one in described["InstanceGroups"]}
    specification = there[cluster.group(group).name]
    specification["InstanceCount"] = count
    if specification.get("MinInstanceCount", 0) > count:
        specification["MinInstanceCount"] = count
    client.update_cluster(ClusterName=cluster.name, InstanceGroups=[specification])


def replace(client: Any, cluster: Cluster, nodes: list[Node]) -> None:
    """Have HyperPod replace instances. Raises UserError with a line for each that it refuses."""
    refused = []
    for start in range(0, len(nodes), _MOST_REPLACED):
        ids = [node.instance_id for node in nodes[start : start + _MOST_REPLACED]]
        answer = client.batch_replace_cluster_nodes(ClusterName=cluster.name, NodeIds=ids)
        refused += [f"{one['NodeId']} ({one['ErrorCode']}: {one['Message']})" for one in answer.get("Failed", [])]
    if refused:
        raise UserError(
            f"cluster {cluster.name}: not replaced: {', '.join(refused)}", "look at `hyperpod-ft cluster nodes`"
        )


def delete(client: Any, name: str) -> bool:
    """Ask for it to be deleted; False when HyperPod does not do that as long as the cluster changes."""
    try:
        client.delete_cluster(ClusterName=name)
    except client.exceptions.ClientError as error:
        if error_code(error) == "ConflictException":
            return False
        if error_code(error) != "ResourceNotFound":
            raise
    return True


def pick(nodes: list[Node], wanted: str) -> Node:
    """The node of this instance id or host name. Raises UserError when there is none."""
    for node in nodes:
        if wanted and wanted in (node.instance_id, node.hostname):
            return node
    known = [node.instance_id for node in nodes]
    raise UserError(
        f"no node {wanted!r}" + did_you_mean(wanted, known),
        "give an instance id or host name of `hyperpod-ft cluster nodes`",
    )


def of_description(described: dict[str, Any]) -> Cluster:
    """The cluster that `DescribeCluster` describes."""
    return Cluster(
        name=described["ClusterName"],
        arn=described["ClusterArn"],
        status=described["ClusterStatus"],
        failure=described.get("FailureMessage", ""),
        groups=tuple(
            Group(
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
    )
