"""Changes to instance groups and to a whole cluster, by `UpdateCluster`. `client` is boto3's for sagemaker."""

from collections.abc import Sequence
from typing import Any

from hyperpod_ft.cluster.hyperpod import api, batches
from hyperpod_ft.cluster.hyperpod.api import HyperPodCluster
from hyperpod_ft.cluster.hyperpod.specification import group_specification
from hyperpod_ft.errors import UserError


def scale(client: Any, cluster: HyperPodCluster, name: str, count: int) -> None:
    """Set a group's number of instances; keep its other settings. Raises UserError."""
    described, groups = _described(client, cluster)
    group = groups[cluster.group(name).name]
    more = count - group["InstanceCount"]
    # "a safer alternative to UpdateCluster for scaling", which only continuous provisioning has
    if more > 0 and described.get("NodeProvisioningMode") == "Continuous":
        batches.add(client, cluster.name, name, more)
        return
    group["InstanceCount"] = count
    if group.get("MinInstanceCount", 0) > count:
        group["MinInstanceCount"] = count
    client.update_cluster(ClusterName=cluster.name, InstanceGroups=[group])


def delete(client: Any, cluster: HyperPodCluster, name: str) -> None:
    """Remove a group with its instances. Raises UserError."""
    _described(client, cluster)
    client.update_cluster(ClusterName=cluster.name, InstanceGroupsToDelete=[cluster.group(name).name])


def set_auto_patch(client: Any, cluster: HyperPodCluster, names: Sequence[str], strategy: str) -> None:
    """Have HyperPod patch groups on its own, `WhenIdle` or `WhenAllIdle`; keep their other settings and date.

    Raises UserError.
    """
    _, groups = _described(client, cluster)
    changed = [
        {**groups[name], "AutoPatchConfig": {**groups[name].get("AutoPatchConfig", {}), "PatchingStrategy": strategy}}
        for name in names
    ]
    client.update_cluster(ClusterName=cluster.name, InstanceGroups=changed)


def set_node_recovery(client: Any, cluster: HyperPodCluster, mode: str) -> None:
    """Set whether HyperPod replaces faulty nodes: `Automatic` or `None`. Raises UserError."""
    _described(client, cluster)
    client.update_cluster(ClusterName=cluster.name, NodeRecovery=mode)


def require_slurm(cluster: HyperPodCluster) -> None:
    """Raises UserError under Kubernetes."""
    if cluster.kubernetes:
        raise UserError(
            f"cluster {cluster.name} uses Kubernetes (EKS), which this kit cannot change",
            "use the AWS CLI: aws sagemaker update-cluster, or update-cluster-software",
        )


def _described(client: Any, cluster: HyperPodCluster) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """DescribeCluster's answer, and every group as `UpdateCluster` takes it. Raises UserError under Kubernetes."""
    require_slurm(cluster)
    described = api.describe(client, cluster.name)
    if described is None:
        raise UserError(f"cluster {cluster.name} no longer exists", "check `hyperpod-ft cluster status`")
    return described, {group["InstanceGroupName"]: group_specification(group) for group in described["InstanceGroups"]}
