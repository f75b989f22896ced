"""Changes to instance groups, their nodes, and a whole cluster. `client` is boto3's for sagemaker throughout.

`UpdateCluster` replaces a group's settings: a field that is left out gets its default, so that automatic patching might
end and new nodes get another image. So each change begins with everything that the group has.

A batch operation on named nodes answers for every node; a refusal of one does not stop the others.
"""

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from hyperpod_ft.cluster.hyperpod import api
from hyperpod_ft.cluster.hyperpod.api import HyperPodCluster, Node
from hyperpod_ft.errors import UserError

# with the same name and form in ClusterInstanceGroupDetails and ClusterInstanceGroupSpecification
_SHARED = (
    "InstanceGroupName",
    "InstanceType",
    "LifeCycleConfig",
    "ExecutionRole",
    "ThreadsPerCore",
    "InstanceStorageConfigs",
    "OnStartDeepHealthChecks",
    "TrainingPlanArn",
    "OverrideVpcConfig",
    "ScheduledUpdateConfig",
    "SlurmConfig",
    "CapacityRequirements",
    "NetworkInterface",
)
# The most nodes in one request, from botocore's model and documentation of each operation
_MOST_REPLACED, _MOST_REBOOTED, _MOST_DELETED, _MOST_ADDED = 25, 25, 99, 50


def scale(client: Any, cluster: HyperPodCluster, name: str, count: int) -> None:
    """Set a group's number of instances; keep its other settings. Raises UserError."""
    described, groups = _described(client, cluster)
    group = groups[cluster.group(name).name]
    more = count - group["InstanceCount"]
    # "a safer alternative to UpdateCluster for scaling", which only continuous provisioning has
    if more > 0 and described.get("NodeProvisioningMode") == "Continuous":
        add_instances(client, cluster.name, name, more)
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


def group_specification(described: dict[str, Any]) -> dict[str, Any]:
    """An instance group of `DescribeCluster`'s answer in the form that `UpdateCluster` takes, unchanged.

    All but KubernetesConfig, which groups of Slurm clusters do not have.
    """
    specification = {key: described[key] for key in _SHARED if described.get(key)}
    specification["InstanceCount"] = described["TargetCount"]
    if described.get("MinCount"):
        specification["MinInstanceCount"] = described["MinCount"]
    if flexible := described.get("InstanceRequirements"):
        specification.pop("InstanceType", None)  # the two exclude each other
        types = flexible.get("DesiredInstanceTypes") or flexible["CurrentInstanceTypes"]
        specification["InstanceRequirements"] = {"InstanceTypes": types}
    if patching := described.get("AutoPatchConfig"):
        specification["AutoPatchConfig"] = _auto_patch(patching)
    # an image of HyperPod's has a version; a custom one only an id
    for image in ("ImageReleaseVersion", "ImageId"):
        if value := described.get(f"Desired{image}") or described.get(f"Current{image}"):
            specification[image] = value
            break
    return specification


def _auto_patch(described: dict[str, Any]) -> dict[str, Any]:
    """`ClusterAutoPatchConfigDetails` as `ClusterAutoPatchConfig`.

    A date is repeated only if somebody asked for it and it is not yet set: HyperPod sets the others itself.
    """
    config = dict(described)
    current, desired = (config.pop(f"{which}PatchSchedule", None) for which in ("Current", "Desired"))
    if desired and desired != current:
        config["PatchSchedule"] = desired
    return config


def replace_nodes(client: Any, cluster: str, nodes: Sequence[Node]) -> None:
    """Have HyperPod replace instances by new ones. Raises UserError that names each instance it refused."""
    _each(client.batch_replace_cluster_nodes, cluster, nodes, _MOST_REPLACED, "replaced")


def reboot_nodes(client: Any, cluster: str, nodes: Sequence[Node]) -> None:
    """Have HyperPod restart the operating system of instances. Raises UserError likewise."""
    _each(client.batch_reboot_cluster_nodes, cluster, nodes, _MOST_REBOOTED, "rebooted")


def delete_nodes(client: Any, cluster: str, nodes: Sequence[Node]) -> None:
    """Have HyperPod terminate instances and reduce their groups' targets. Raises UserError likewise."""
    _each(client.batch_delete_cluster_nodes, cluster, nodes, _MOST_DELETED, "deleted")


def add_instances(client: Any, cluster: str, group: str, count: int) -> None:
    """Raise a group's target by `count`; for clusters with continuous provisioning. Raises UserError if refused."""
    for start in range(0, count, _MOST_ADDED):
        wanted = {"InstanceGroupName": group, "IncrementTargetCountBy": min(_MOST_ADDED, count - start)}
        # botocore may send a request again whose answer was lost; the token keeps it from counting twice
        answer = client.batch_add_cluster_nodes(ClusterName=cluster, NodesToAdd=[wanted], ClientToken=uuid.uuid4().hex)
        if failed := answer["Failed"]:
            reasons = ", ".join(f"{one['FailedCount']} ({_reason(one)})" for one in failed)
            raise UserError(f"cluster {cluster}: {group}: instances not added: {reasons}", "fix the cause; try again")


def _each(operation: Callable[..., dict[str, Any]], cluster: str, nodes: Sequence[Node], most: int, done: str) -> None:
    refused: list[str] = []
    for start in range(0, len(nodes), most):
        ids = [node.instance_id for node in nodes[start : start + most]]
        answer = operation(ClusterName=cluster, NodeIds=ids)
        refused += [f"{one['NodeId']} ({_reason(one)})" for one in answer.get("Failed") or []]
    if refused:
        raise UserError(
            f"cluster {cluster}: not {done}: {', '.join(refused)}", "check `hyperpod-ft cluster status --nodes`"
        )


def _reason(failed: dict[str, Any]) -> str:
    """BatchDeleteClusterNodes calls the code `Code`, the others `ErrorCode`; one of a group may have no message."""
    code = failed.get("ErrorCode") or failed["Code"]
    return f"{code}: {failed['Message']}" if failed.get("Message") else code
