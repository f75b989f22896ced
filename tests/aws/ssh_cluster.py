"""Cluster `c` with a node to log in to for each of its instances; shared by the tests of ssh."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.cluster.hyperpod import api
from hyperpod_ft.cluster.hyperpod.api import GroupRoles, GroupState, HyperPodCluster, Node, list_nodes
from hyperpod_ft.cluster.ssh import connect as ssh
from hyperpod_ft.cluster.ssh import ssm
from tests.aws.account_place import Place, cluster_request
from tests.aws.conftest import REGION, Aws
from tests.aws.ssh_nodes import USER, Nodes
from tests.waiting import wait_for

AWS_CLI = ssm.AwsCli(REGION)
Reach = Callable[..., ssh.SshRoute]  # from the user's home directory, with fields of SshRequest


def a_cluster(*names: str, roles: bool = True) -> HyperPodCluster:
    kinds = {"login-group": "Login", "controller-machine": "Controller"}
    return HyperPodCluster(
        "c",
        f"arn:aws:sagemaker:{REGION}:123456789012:cluster/abc123",
        "InService",
        "",
        tuple(GroupState(name, "", 1, 1, "", "", kinds.get(name, "Compute") if roles else "") for name in names),
        subnets=(),
        kubernetes=False,
    )


def a_node(group: str, instance: str, status: str = "Running", hostname: str = "", message: str = "") -> Node:
    return Node(group, instance, "ml.trn1.32xlarge", status, message, 0.0, hostname)


@pytest.fixture
def sagemaker(aws: Aws, place: Place, nodes: Nodes) -> Any:
    """Cluster c with a controller and two worker groups, InService, with a node to log in to for each."""
    client = aws.client("sagemaker")
    workers = ("worker-group-10", 1, "ml.trn2.48xlarge"), ("worker-group-1", 1, "ml.trn1.32xlarge")
    client.create_cluster(**cluster_request(place, "c", "lifecycle", *workers))
    wait_for(lambda: client.describe_cluster(ClusterName="c")["ClusterStatus"] == "InService")
    for node in list_nodes(client, "c"):
        nodes.add(node.instance_id)
    return client


@pytest.fixture
def reachable(sagemaker: Any) -> Reach:
    def make(home: Path, **request: Any) -> ssh.SshRoute:
        cluster = api.require(sagemaker, "c")
        nodes, roles = list_nodes(sagemaker, "c"), GroupRoles.of(cluster, None)
        return ssh.choose_route(cluster, nodes, roles, AWS_CLI, ssh.SshRequest(USER, **request), home)

    return make


def instance_of(sagemaker: Any, name: str) -> str:
    (found,) = [node.instance_id for node in list_nodes(sagemaker, "c") if node.group == name and node.running]
    return found


def replace(sagemaker: Any, nodes: Nodes, name: str) -> tuple[str, str]:
    """Have HyperPod replace the node of a group; returns the instances before and after."""
    old = instance_of(sagemaker, name)
    sagemaker.batch_replace_cluster_nodes(ClusterName="c", NodeIds=[old])
    wait_for(lambda: any(n.running and n.group == name and n.instance_id != old for n in list_nodes(sagemaker, "c")))
    wait_for(lambda: not any(n.instance_id == old for n in list_nodes(sagemaker, "c")))
    new = instance_of(sagemaker, name)
    nodes.add(new)
    return old, new
