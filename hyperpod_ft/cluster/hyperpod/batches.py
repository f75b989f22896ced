"""Changes to named nodes, by HyperPod's batch operations. `client` is boto3's for sagemaker throughout.

Each operation answers for every node; a refusal of one does not stop the others.
"""

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from hyperpod_ft.cluster.hyperpod.nodes import Node
from hyperpod_ft.errors import UserError

# The most nodes in one request, from botocore's model and documentation of each operation
_MOST_REPLACED, _MOST_REBOOTED, _MOST_DELETED, _MOST_ADDED = 25, 25, 99, 50


def replace(client: Any, cluster: str, nodes: Sequence[Node]) -> None:
    """Have HyperPod replace instances by new ones. Raises UserError that names each instance it refused."""
    _each(client.batch_replace_cluster_nodes, cluster, nodes, _MOST_REPLACED, "replaced")


def reboot(client: Any, cluster: str, nodes: Sequence[Node]) -> None:
    """Have HyperPod restart the operating system of instances. Raises UserError likewise."""
    _each(client.batch_reboot_cluster_nodes, cluster, nodes, _MOST_REBOOTED, "rebooted")


def delete(client: Any, cluster: str, nodes: Sequence[Node]) -> None:
    """Have HyperPod terminate instances and reduce their groups' targets. Raises UserError likewise."""
    _each(client.batch_delete_cluster_nodes, cluster, nodes, _MOST_DELETED, "deleted")


def add(client: Any, cluster: str, group: str, count: int) -> None:
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
        raise UserError(f"cluster {cluster}: not {done}: {', '.join(refused)}", "check `hyperpod-ft cluster nodes`")


def _reason(failed: dict[str, Any]) -> str:
    """BatchDeleteClusterNodes calls the code `Code`, the others `ErrorCode`; one of a group may have no message."""
    code = failed.get("ErrorCode") or failed["Code"]
    return f"{code}: {failed['Message']}" if failed.get("Message") else code
