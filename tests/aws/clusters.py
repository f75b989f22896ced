"""SageMaker HyperPod clusters: their states over time, their nodes, and every operation of the kit's commands.

Without NodeProvisioningMode a cluster is Creating (Updating) until all nodes run, and Failed (InService as before, with
a FailureMessage) when one does not. With Continuous it is InService soon and TargetCount runs ahead of CurrentCount; a
node that fails is tried again for ever."""

import copy
import secrets
import string
import uuid
from collections import Counter
from datetime import datetime, timezone
from typing import Any

from tests.aws.clock import Process
from tests.aws.cluster_checks import check_groups, check_quotas, invalid
from tests.aws.nodes import Node, provision, shut_down
from tests.aws.wire import AwsError, operation
from tests.aws.world import ACCOUNT, Region

# What a description repeats of the request.
_GROUP_FIELDS = (
    *("InstanceGroupName", "InstanceType", "LifeCycleConfig", "ExecutionRole", "ThreadsPerCore"),
    *("InstanceStorageConfigs", "OnStartDeepHealthChecks", "TrainingPlanArn", "OverrideVpcConfig"),
    *("ScheduledUpdateConfig", "SlurmConfig", "ImageReleaseVersion"),
)
_CLUSTER_FIELDS = ("VpcConfig", "Orchestrator", "NodeRecovery", "NodeProvisioningMode", "TieredStorageConfig")
_ALPHABET = string.ascii_lowercase + string.digits


class Cluster:
    def __init__(self, region: Region, request: dict[str, Any]) -> None:
        self.region, self.request = region, copy.deepcopy(request)
        self.name: str = request["ClusterName"]
        self.id = "".join(secrets.choice(_ALPHABET) for _ in range(12))
        self.arn = f"arn:aws:sagemaker:{region.name}:{ACCOUNT}:cluster/{self.id}"
        self.status, self.failure = "Creating", ""
        self.created = datetime.now(timezone.utc)
        self.specifications = {group["InstanceGroupName"]: group for group in self.request["InstanceGroups"]}
        self.nodes: list[Node] = []
        self.events: list[dict[str, Any]] = []
        self._addresses = 0
        region.clusters[self.name] = self
        self.event("Cluster creation started")
        region.world.clock.start(self._create())

    @property
    def continuous(self) -> bool:
        return self.request.get("NodeProvisioningMode") == "Continuous"

    @property
    def log_group(self) -> str:
        return f"/aws/sagemaker/Clusters/{self.name}/{self.id}"

    @property
    def subnets(self) -> list[str]:
        return [s for place in self._places() for s in place["Subnets"]]

    @property
    def security_groups(self) -> list[str]:
        return [s for place in self._places() for s in place["SecurityGroupIds"]]

    def _places(self) -> list[dict[str, Any]]:
        places = [self.request.get("VpcConfig")]
        return [p for p in [*places, *(g.get("OverrideVpcConfig") for g in self.specifications.values())] if p]

    def placement(self, group: str) -> tuple[str, str]:
        place = self.specifications[group].get("OverrideVpcConfig") or self.request.get("VpcConfig")
        if not place:
            return f"{self.region.name}a", ""
        subnet = self.region.client("ec2").describe_subnets(SubnetIds=place["Subnets"][:1])["Subnets"][0]
        return subnet["AvailabilityZone"], subnet["AvailabilityZoneId"]

    def next_address(self) -> int:
        self._addresses += 1
        return self._addresses

    def event(self, description: str, node: Node | None = None) -> None:
        failed = node is not None and node.status == "Failure"
        self.events.append(
            {
                "EventId": str(uuid.uuid4()),
                "ClusterArn": self.arn,
                "ClusterName": self.name,
                "InstanceGroupName": node.group if node else None,
                "InstanceId": (node.id or None) if node else None,
                "ResourceType": "Instance" if node else "Cluster",
                "EventTime": datetime.now(timezone.utc),
                "Description": description,
                "EventLevel": "Error" if failed else "Info",
            }
        )

    def of_group(self, name: str) -> list[Node]:
        return [node for node in self.nodes if node.group == name and not node.removed]

    def _missing(self) -> list[Node]:
        """New nodes, Pending, for every group that has fewer than it should."""
        new = [
            Node(self, name)
            for name, group in self.specifications.items()
            for _ in range(group["InstanceCount"] - len(self.of_group(name)))
        ]
        self.nodes += new
        return new

    def _surplus(self) -> list[Node]:
        left = [node for node in self.nodes if node.group not in self.specifications and not node.removed]
        for name, group in self.specifications.items():
            left += self.of_group(name)[group["InstanceCount"] :]
        return left

    def _create(self) -> Process:
        yield self.region.seconds("cluster.create")
        nodes = self._missing()
        if self.continuous:
            self._in_service()
            self.provision_each(nodes)
            return
        yield from provision(nodes)
        if any(node.status == "Failure" for node in nodes):
            self.status = "RollingBack"
            yield from self._roll_back(nodes)
            self.status = "Failed"
        else:
            self._in_service()

    def _roll_back(self, nodes: list[Node]) -> Process:
        self.failure = next(node.message for node in nodes if node.status == "Failure")
        yield self.region.seconds("node.failed")
        yield from shut_down(nodes)
        yield self.region.seconds("cluster.rollback")

    def _in_service(self) -> None:
        self.status = "InService"
        self.event("Cluster is InService")

    def provision_each(self, nodes: list[Node]) -> None:
        for node in nodes:
            self.region.world.clock.start(self._provision_until_running(node))

    def _provision_until_running(self, node: Node) -> Process:
        yield from provision([node])
        while node.status == "Failure" and not node.removed:
            yield self.region.seconds("node.failed")
            if node.removed:
                return
            node.become("ShuttingDown")
            yield self.region.seconds("node.shutdown")
            if node.removed:
                return
            node.terminate()
            node.become("Pending")
            yield from provision([node])

    def update(self, groups: list[dict[str, Any]], delete: list[str], changes: dict[str, Any]) -> None:
        before = copy.deepcopy(self.specifications)
        for group in groups:
            self.specifications[group["InstanceGroupName"]] = copy.deepcopy(group)
        gone = {name: self.specifications.pop(name) for name in delete}
        self.request |= changes
        if self.continuous:
            self.region.world.clock.start(self._take_away(self._surplus(), gone))
            self.provision_each(self._missing())
        else:
            self.status, self.failure = "Updating", ""
            self.region.world.clock.start(self._update(before, gone))

    def _take_away(self, nodes: list[Node], gone: dict[str, Any]) -> Process:
        self.specifications |= gone  # their nodes are shown until they have gone
        yield from shut_down(nodes)
        for name in gone:
            self.specifications.pop(name, None)

    def _update(self, before: dict[str, Any], gone: dict[str, Any]) -> Process:
        surplus, new = self._surplus(), self._missing()
        yield self.region.seconds("cluster.update")
        yield from self._take_away(surplus, gone)
        yield from provision(new)
        if any(node.status == "Failure" for node in new):
            self.status = "RollingBack"
            yield from self._roll_back(new)
            self.specifications = {name: group for name, group in before.items() if name not in gone}
        self._in_service()

    def update_software(self) -> None:
        self.status = "SystemUpdating"
        self.region.world.clock.start(self._update_software())

    def _update_software(self) -> Process:
        for node in list(self.nodes):
            node.become("SystemUpdating")
            yield self.region.seconds("node.update")
            if not node.removed:
                node.run_lifecycle()
                node.become("Running")
        self._in_service()

    def replace(self, node: Node) -> None:
        self.region.world.clock.start(self._replace(node))

    def _replace(self, node: Node) -> Process:
        new = Node(self, node.group)
        new.logical_id = node.logical_id
        yield from shut_down([node])
        self.nodes.append(new)
        yield from self._provision_until_running(new)

    def reboot(self, node: Node) -> None:
        self.region.world.clock.start(self._reboot(node))

    def _reboot(self, node: Node) -> Process:
        node.become("Pending")
        yield self.region.seconds("node.reboot")
        if not node.removed:
            node.become("Running")  # no lifecycle script: it does not run on a reboot

    def remove(self, nodes: list[Node]) -> None:
        for node in nodes:
            self.specifications[node.group]["InstanceCount"] -= 1
        self.region.world.clock.start(shut_down(nodes))

    def delete(self) -> None:
        self.status = "Deleting"
        self.region.world.clock.start(self._delete())

    def _delete(self) -> Process:
        yield from shut_down([node for node in self.nodes if not node.removed])
        yield self.region.seconds("cluster.delete")
        del self.region.clusters[self.name]

    def _describe_group(self, name: str, group: dict[str, Any]) -> dict[str, Any]:
        current = sum(node.present for node in self.of_group(name))
        if self.continuous:
            status = "InService"
        else:
            status = {"RollingBack": "Updating"}.get(self.status, self.status)
        return {
            **{key: group[key] for key in _GROUP_FIELDS if key in group},
            "CurrentCount": current,
            "TargetCount": group["InstanceCount"],
            "MinCount": group.get("MinInstanceCount"),
            "Status": status,
        }

    def describe(self) -> dict[str, Any]:
        return {
            "ClusterArn": self.arn,
            "ClusterName": self.name,
            "ClusterStatus": self.status,
            "CreationTime": self.created,
            "FailureMessage": self.failure or None,
            "InstanceGroups": [self._describe_group(*named) for named in self.specifications.items()],
            **{key: self.request[key] for key in _CLUSTER_FIELDS if key in self.request},
        }


def find(region: Region, name: str) -> Cluster:
    for cluster in region.clusters.values():
        if name in (cluster.name, cluster.arn):
            return cluster
    arn = name if name.startswith("arn:") else f"arn:aws:sagemaker:{region.name}:{ACCOUNT}:cluster/{name}"
    raise AwsError("ResourceNotFound", f"Cluster with name {arn} could not be found.")


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
    cluster.update_software()
    return {"ClusterArn": cluster.arn}


@operation("sagemaker", "DeleteCluster")
def delete_cluster(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    cluster = _settled(find(region, request["ClusterName"]), "delete")
    cluster.delete()
    return {"ClusterArn": cluster.arn}


@operation("sagemaker", "DescribeCluster")
def describe_cluster(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    return find(region, request["ClusterName"]).describe()


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
    """`InstanceGroupNameContains` is a substring, as AWS's: "worker" finds "worker-2" too."""
    cluster, part = find(region, request["ClusterName"]), request.get("InstanceGroupNameContains", "")
    found = [n.summary() for n in cluster.nodes if part in n.group and (n.id or cluster.continuous)]
    if request.get("SortOrder") == "Descending":
        found.reverse()
    page, token = _page(found, request, 10)
    return {"ClusterNodeSummaries": page, "NextToken": token}


@operation("sagemaker", "DescribeClusterNode")
def describe_cluster_node(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    cluster = find(region, request["ClusterName"])
    for node in cluster.nodes:
        if request.get("NodeId") == node.id or request.get("NodeLogicalId") == node.logical_id:
            return {"NodeDetails": node.details()}
    wanted = request.get("NodeId") or request.get("NodeLogicalId")
    raise AwsError("ResourceNotFound", f"Instance {wanted} of cluster {cluster.arn} could not be found.")


def _page(found: list[Any], request: dict[str, Any], default: int) -> tuple[list[Any], str | None]:
    token = request.get("NextToken", "0")
    if not token.isdigit():
        raise invalid("The pagination token is invalid")
    first, size = int(token), request.get("MaxResults", default)
    return found[first : first + size], str(first + size) if first + size < len(found) else None


def _chosen(
    cluster: Cluster, request: dict[str, Any], codes: tuple[str, str, str], *, controller: bool
) -> tuple[list[Node], list[dict[str, str]]]:
    """The nodes that a batch operation may have, and an error for each other; `codes`: not found, bad state, in use."""
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
    return {"Successful": done, "Failed": bad}


@operation("sagemaker", "ListClusterEvents")
def list_cluster_events(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    cluster = find(region, request["ClusterName"])
    if not cluster.continuous:
        raise invalid("Cluster events need a cluster with NodeProvisioningMode Continuous")
    asked = {"InstanceGroupName": "InstanceGroupName", "NodeId": "InstanceId", "ResourceType": "ResourceType"}
    found = [
        event
        for event in cluster.events
        if all(event[field] == request[key] for key, field in asked.items() if key in request)
    ]
    if request.get("SortOrder", "Descending") == "Descending":
        found.reverse()
    page, token = _page(found, request, 10)
    return {"Events": page, "NextToken": token}


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
