"""Every operation on HyperPod clusters that the kit calls: what each refuses and returns."""

import secrets
from collections import Counter
from typing import Any

from tests.aws.cluster_checks import check_groups, check_quotas, invalid
from tests.aws.clusters import NEWEST_IMAGE, Cluster, find
from tests.aws.nodes import Node
from tests.aws.wire import AwsError, operation
from tests.aws.world import Region


def _settled(cluster: Cluster, action: str) -> Cluster:
    if cluster.status not in ("InService", "Failed") or (cluster.status == "Failed" and action != "delete"):
        raise AwsError(
            "ConflictException", f"Cannot {action} cluster {cluster.name} while it is in {cluster.status} state"
        )
    return cluster


def _totals(region: Region, but: str, groups: list[dict[str, Any]]) -> Counter[str]:
    wanted: Counter[str] = Counter()
    for cluster in region.clusters.values():
        for group in cluster.specifications.values() if cluster.name != but else []:
            wanted[group["InstanceType"]] += group["InstanceCount"]
    for group in groups:
        wanted[group["InstanceType"]] += group["InstanceCount"]
    return wanted


@operation("sagemaker", "CreateCluster")
def create_cluster(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    if request["ClusterName"] in region.clusters:
        arn = region.clusters[request["ClusterName"]].arn
        raise AwsError("ResourceInUse", f"Resource Already Exists: Cluster with name {arn} already exists.")
    groups = request.get("InstanceGroups")
    if not groups:
        raise invalid("InstanceGroups is required")
    check_groups(region, groups, request)
    check_quotas(region, _totals(region, "", groups))
    return {"ClusterArn": Cluster(region, request).arn}


@operation("sagemaker", "UpdateCluster")
def update_cluster(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    cluster = _settled(find(region, request["ClusterName"]), "update")
    groups, delete = request.get("InstanceGroups", []), request.get("InstanceGroupsToDelete", [])
    known = cluster.specifications
    if missing := set(delete) - known.keys():
        raise invalid(f"Instance groups not found: {', '.join(sorted(missing))}")
    for group in groups:
        old = known.get(group["InstanceGroupName"])
        if old and old.get("InstanceType") != group.get("InstanceType"):
            raise invalid(f"The instance type of instance group {group['InstanceGroupName']} cannot change")
        if group.get("AutoPatchConfig", {}).get("PatchingStrategy") == "DrainFirst":
            raise invalid("The patching strategy DrainFirst is only supported for clusters orchestrated by EKS")
    after = {**known, **{group["InstanceGroupName"]: group for group in groups}}
    wanted = [group for name, group in after.items() if name not in delete]
    if not groups and not delete and request.keys() <= {"ClusterName"}:
        raise invalid("No changes were specified")
    changes = {key: request[key] for key in ("NodeRecovery", "Orchestrator") if key in request}
    check_groups(region, wanted, {**cluster.request, **changes})
    check_quotas(region, _totals(region, cluster.name, wanted))
    cluster.update(groups, delete, changes)
    return {"ClusterArn": cluster.arn}


@operation("sagemaker", "UpdateClusterSoftware")
def update_cluster_software(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    cluster = _settled(find(region, request["ClusterName"]), "update the software of")
    groups = request.get("InstanceGroups") or [{"InstanceGroupName": name} for name in cluster.specifications]
    if missing := {group["InstanceGroupName"] for group in groups} - cluster.specifications.keys():
        raise invalid(f"Instance groups not found: {', '.join(sorted(missing))}")
    image = request.get("ImageId", "default").replace("default", NEWEST_IMAGE)
    cluster.update_software({group["InstanceGroupName"]: group.get("ImageReleaseVersion", image) for group in groups})
    return {"ClusterArn": cluster.arn}


@operation("sagemaker", "DeleteCluster")
def delete_cluster(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    cluster = _settled(find(region, request["ClusterName"]), "delete")
    cluster.delete()
    return {"ClusterArn": cluster.arn}


@operation("sagemaker", "DescribeCluster")
def describe_cluster(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    cluster = find(region, request["ClusterName"])
    cluster.described = cluster.status
    return cluster.describe()


@operation("sagemaker", "ListClusters")
def list_clusters(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    found = [c for c in region.clusters.values() if request.get("NameContains", "") in c.name]
    found.sort(key=lambda c: c.name if request.get("SortBy") == "NAME" else c.created.isoformat())
    if request.get("SortOrder", "Descending") == "Descending":
        found.reverse()
    page, token = _page([cluster.describe() for cluster in found], request, 10)
    return {"ClusterSummaries": page, "NextToken": token}


@operation("sagemaker", "ListClusterNodes")
def list_cluster_nodes(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    """`InstanceGroupNameContains` matches substrings, as on AWS: "worker" also finds "worker-2"."""
    cluster, part = find(region, request["ClusterName"]), request.get("InstanceGroupNameContains", "")
    logical = request.get("IncludeNodeLogicalIds", False)
    found = [node for node in cluster.nodes if part in node.group and (node.id or logical)]
    if request.get("SortOrder") == "Descending":
        found.reverse()
    page, token = _page(found, request, 10)
    for node in page:
        node.listed = node.status
    summaries = [{**node.summary(), "NodeLogicalId": node.logical_id if logical else None} for node in page]
    return {"ClusterNodeSummaries": summaries, "NextToken": token}


def _page(found: list[Any], request: dict[str, Any], default: int) -> tuple[list[Any], str | None]:
    token = request.get("NextToken", "0")
    if not token.isdigit():
        raise invalid("The pagination token is invalid")
    first, size = int(token), request.get("MaxResults", default)
    return found[first : first + size], str(first + size) if first + size < len(found) else None


def _chosen(
    cluster: Cluster, request: dict[str, Any], codes: tuple[str, str, str], *, controller: bool
) -> tuple[list[Node], list[dict[str, str]]]:
    """Nodes that a batch operation may change, and an error for each other; `codes`: not found, bad state, in use."""
    good: list[Node] = []
    bad: list[dict[str, str]] = []
    by_id = {node.id: node for node in cluster.nodes if node.id}
    for identifier in request.get("NodeIds", []):
        node = by_id.get(identifier)
        kind = node and node.specification.get("SlurmConfig", {}).get("NodeType")
        if node is None:
            bad.append({"NodeId": identifier, "ErrorCode": codes[0], "Message": "Node not found in the cluster"})
        elif kind == "Controller" and not controller:
            message = "Slurm controller nodes cannot be removed or replaced"
            bad.append({"NodeId": identifier, "ErrorCode": codes[2], "Message": message})
        elif node.removed or node.status != "Running":
            message = f"Node is in {node.status} state"
            bad.append({"NodeId": identifier, "ErrorCode": codes[1], "Message": message})
        else:
            good.append(node)
    return good, bad


_INSTANCE_CODES = ("InstanceIdNotFound", "InvalidInstanceStatus", "InstanceIdInUse")


@operation("sagemaker", "BatchDeleteClusterNodes")
def batch_delete(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    cluster = _settled(find(region, request["ClusterName"]), "delete nodes of")
    codes = ("NodeIdNotFound", "InvalidNodeStatus", "NodeIdInUse")
    good, bad = _chosen(cluster, request, codes, controller=False)
    done = [node.id for node in good]
    cluster.remove(good)
    return {"Successful": done, "Failed": [{**error, "Code": error["ErrorCode"]} for error in bad]}


@operation("sagemaker", "BatchReplaceClusterNodes")
def batch_replace(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    cluster = _settled(find(region, request["ClusterName"]), "replace nodes of")
    good, bad = _chosen(cluster, request, _INSTANCE_CODES, controller=False)
    done = [node.id for node in good]
    for node in good:
        cluster.replace(node)
    return {"Successful": done, "Failed": bad}


@operation("sagemaker", "BatchRebootClusterNodes")
def batch_reboot(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    cluster = _settled(find(region, request["ClusterName"]), "reboot nodes of")
    good, bad = _chosen(cluster, request, _INSTANCE_CODES, controller=True)
    for node in good:
        cluster.reboot(node)
    return {"Successful": [node.id for node in good], "Failed": bad}


@operation("sagemaker", "BatchAddClusterNodes")
def batch_add(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    cluster = _settled(find(region, request["ClusterName"]), "add nodes to")
    if not cluster.continuous:
        raise invalid("BatchAddClusterNodes is only supported for clusters with NodeProvisioningMode Continuous")
    token = request.get("ClientToken")
    if token in cluster.tokens:
        return cluster.tokens[token]
    if sum(wanted["IncrementTargetCountBy"] for wanted in request["NodesToAdd"]) > 50:
        raise invalid("You can add at most 50 nodes in a single request")
    more = Counter({wanted["InstanceGroupName"]: wanted["IncrementTargetCountBy"] for wanted in request["NodesToAdd"]})
    groups = [
        {**group, "InstanceCount": group["InstanceCount"] + more[name]}
        for name, group in cluster.specifications.items()
    ]
    check_quotas(region, _totals(region, cluster.name, groups))
    good: list[Node] = []
    bad: list[dict[str, Any]] = []
    for wanted in request["NodesToAdd"]:
        name, count = wanted["InstanceGroupName"], wanted["IncrementTargetCountBy"]
        if name in cluster.specifications:
            cluster.specifications[name]["InstanceCount"] += count
            new = [Node(cluster, name) for _ in range(count)]
            cluster.nodes += new
            cluster.provision_each(new)
            good += new
        else:
            bad.append({"InstanceGroupName": name, "ErrorCode": "InstanceGroupNotFound", "FailedCount": count})
    done = [{"NodeLogicalId": n.logical_id, "InstanceGroupName": n.group, "Status": n.status} for n in good]
    answer = {"Successful": done, "Failed": bad}
    return cluster.tokens.setdefault(token, answer) if token else answer


def _with_events(region: Region, name: str) -> Cluster:
    cluster = find(region, name)
    if not cluster.continuous:
        raise invalid("Cluster events need a cluster with NodeProvisioningMode Continuous")
    return cluster


@operation("sagemaker", "ListClusterEvents")
def list_cluster_events(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    cluster = _with_events(region, request["ClusterName"])
    asked = {"InstanceGroupName": "InstanceGroupName", "NodeId": "InstanceId", "ResourceType": "ResourceType"}
    found = [
        event
        for event in cluster.events
        if all(event[field] == request[key] for key, field in asked.items() if key in request)
    ]
    if request.get("SortOrder", "Descending") == "Descending":
        found.reverse()
    page, token = _page(found, request, 10)
    return {
        "Events": [{key: event[key] for key in event if key != "EventDetails"} for event in page],
        "NextToken": token,
    }


@operation("sagemaker", "DescribeClusterEvent")
def describe_cluster_event(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    cluster = _with_events(region, request["ClusterName"])
    for event in cluster.events:
        if event["EventId"] == request["EventId"]:
            return {"EventDetails": event}
    raise AwsError("ResourceNotFound", f"Event {request['EventId']} of cluster {cluster.arn} could not be found.")


@operation("ssm", "StartSession")
def start_session(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    """A session on a running node (`sagemaker-cluster:CLUSTER-ID_GROUP-INSTANCE-ID`); its stream leads nowhere."""
    target = request["Target"]
    for cluster in region.clusters.values():
        for node in cluster.nodes:
            if target == f"sagemaker-cluster:{cluster.id}_{node.group}-{node.id}" and node.status == "Running":
                session = f"testing-{secrets.token_hex(8)}"
                return {"SessionId": session, "TokenValue": "none", "StreamUrl": f"wss://127.0.0.1:9/{session}"}
    raise AwsError("TargetNotConnected", f"{target} is not connected.")
