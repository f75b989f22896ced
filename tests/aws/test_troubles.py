"""What goes wrong around `hyperpod-ft cluster`, against the server that stands in for AWS (server.py)."""

from typing import Any

from tests.aws.kit import NAME, Kit

DENIED = {"code": "AccessDeniedException", "message": "User: x is not authorized to perform: y:Z", "times": 99}


def made_by_others(kit: Kit, **changes: Any) -> dict[str, Any]:
    """Have a cluster of the kit's name that another file made; as it is described."""
    kit.configure(name="other")
    kit.run("create")
    sagemaker = kit.aws.client("sagemaker")
    other = sagemaker.describe_cluster(ClusterName="other")
    copied = ("InstanceGroupName", "InstanceType", "LifeCycleConfig", "ExecutionRole")
    groups = [
        {"InstanceCount": group["TargetCount"], **{key: group[key] for key in copied}}
        for group in other["InstanceGroups"]
    ]
    sagemaker.create_cluster(ClusterName=NAME, InstanceGroups=groups, VpcConfig=other["VpcConfig"], **changes)
    kit.run("status", NAME)
    described: dict[str, Any] = sagemaker.describe_cluster(ClusterName=NAME)
    kit.configure()
    return described


def test_a_cluster_of_others_is_left_alone(kit: Kit) -> None:
    """Its name is this cluster file's: nothing is paid for, and it gets neither scripts nor groups."""
    before = made_by_others(kit)
    assert "stands on other subnets" in kit.run("validate", status=1)
    assert "stands on other subnets" in kit.run("create", status=2)
    assert len(kit.aws.client("cloudformation").describe_stacks()["Stacks"]) == 1, "that of the other cluster"
    after = kit.aws.client("sagemaker").describe_cluster(ClusterName=NAME)
    assert after["InstanceGroups"] == before["InstanceGroups"]


def test_a_cluster_of_others_that_could_not_be_checked_before(kit: Kit) -> None:
    """What validation was not told it only warns of; `create` still spends nothing on such a name."""
    before = made_by_others(kit)
    # as often as validation asks
    kit.aws.scenario(errors=[{"service": "cloudformation", "operation": "DescribeStacks", **DENIED, "times": 2}])
    output = kit.run("create", status=2)
    assert "could not check name" in output
    assert "stands on other subnets" in output
    after = kit.aws.client("sagemaker").describe_cluster(ClusterName=NAME)
    assert after["InstanceGroups"] == before["InstanceGroups"]


def test_who_may_not_look_at_clusters_pays_for_no_stack(kit: Kit) -> None:
    kit.aws.scenario(errors=[{"service": "sagemaker", **DENIED}])
    assert "access denied" in kit.run("create", status=2)
    assert kit.aws.client("cloudformation").describe_stacks()["Stacks"] == []


def test_an_eks_cluster_is_not_scaled(kit: Kit) -> None:
    """UpdateCluster would be sent what the kit knows of a group, which is not what Kubernetes needs."""
    made_by_others(kit, Orchestrator={"Eks": {"ClusterArn": "arn:aws:eks:us-west-2:123456789012:cluster/mine"}})
    assert "Kubernetes" in kit.run("scale", NAME, "worker-group-1", "2", status=2)
    assert "UpdateCluster" not in [operation for _, operation in kit.aws.requests()]
