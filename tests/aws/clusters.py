"""SageMaker HyperPod clusters: their states over time, and their nodes (operations: cluster_operations.py).

Without NodeProvisioningMode a cluster is Creating (Updating) until all nodes run, and Failed (InService as before, with
a FailureMessage) when one does not. With Continuous it is InService soon and TargetCount runs ahead of CurrentCount; a
node that fails is tried again forever."""

import copy
import secrets
import string
import uuid
from datetime import datetime, timezone
from typing import Any

from tests.aws.clock import Process
from tests.aws.nodes import Node, provision, shut_down
from tests.aws.wire import AwsError
from tests.aws.world import ACCOUNT, Region

# Fields of the request that a description repeats.
_GROUP_FIELDS = (
    *("InstanceGroupName", "InstanceType", "LifeCycleConfig", "ExecutionRole", "ThreadsPerCore"),
    *("InstanceStorageConfigs", "OnStartDeepHealthChecks", "TrainingPlanArn"),
    *("ScheduledUpdateConfig", "SlurmConfig", "CapacityRequirements", "NetworkInterface"),
)
FIRST_IMAGE, NEWEST_IMAGE = "1.4.0", "1.5.0"  # HyperPod's, which new clusters have, and to which they can be updated
_CLUSTER_FIELDS = ("VpcConfig", "Orchestrator", "NodeRecovery", "NodeProvisioningMode")
_ALPHABET = string.ascii_lowercase + string.digits


class Cluster:
    def __init__(self, region: Region, request: dict[str, Any]) -> None:
        self.region, self.request = region, copy.deepcopy(request)
        self.name: str = request["ClusterName"]
        self.id = "".join(secrets.choice(_ALPHABET) for _ in range(12))
        self.arn = f"arn:aws:sagemaker:{region.name}:{ACCOUNT}:cluster/{self.id}"
        self.status, self.failure = "Creating", ""
        self.described = ""  # the status that DescribeCluster last answered
        self.created = datetime.now(timezone.utc)
        self.specifications = {group["InstanceGroupName"]: group for group in self.request["InstanceGroups"]}
        # by group: a release, or a custom image's id
        self.images = {
            group["InstanceGroupName"]: group["ImageId"] for group in request["InstanceGroups"] if "ImageId" in group
        }
        self.tokens: dict[str, dict[str, Any]] = {}  # answers to BatchAddClusterNodes by ClientToken
        self.extensions: dict[str, Any] = {}  # cluster_extensions.Extension by name
        self.updates: dict[str, str] = {}  # SoftwareUpdateStatus by group
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
        return list(self.request.get("VpcConfig", {}).get("Subnets", []))

    @property
    def security_groups(self) -> list[str]:
        return list(self.request.get("VpcConfig", {}).get("SecurityGroupIds", []))

    def next_address(self) -> int:
        self._addresses += 1
        return self._addresses

    def event(self, description: str, node: Node | None = None, failure: str = "") -> None:
        """`failure`: the reason, which DescribeClusterEvent alone returns."""
        about = {"FailureMessage": failure or None, **({"NodeLogicalId": node.logical_id} if node else {})}
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
                "EventLevel": "Error" if failure or (node and node.status == "Failure") else "Info",
                "EventDetails": {"EventMetadata": {"Instance" if node else "Cluster": about}},
            }
        )

    def image_of(self, group: str) -> str:
        return self.images.get(group, FIRST_IMAGE)

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
        yield from self.region.until_over("cluster.create")
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
        while not node.present and not node.removed:
            if node.id:  # it failed; without an instance it waits for capacity
                yield self.region.seconds("node.failed")
                while node.listed != "Failure" and not node.removed:  # as in _update
                    yield 0.01
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
        gone = {name: {**self.specifications.pop(name), "InstanceCount": 0} for name in delete}
        self.request |= changes
        if self.continuous:
            self.region.world.clock.start(self._take_away(self._surplus(), gone))
            self.provision_each(self._missing())
        else:
            self.status, self.failure = "Updating", ""
            self.region.world.clock.start(self._update(before, gone))

    def _take_away(self, nodes: list[Node], gone: dict[str, Any]) -> Process:
        self.specifications |= gone  # their nodes are listed until they have gone
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
            while self.described != "RollingBack":  # so that a client that polls sees it, however slow the machine
                yield 0.01
            self.specifications = {name: group for name, group in before.items() if name not in gone}
        self._in_service()

    def update_software(self, images: dict[str, str]) -> None:
        """Give groups another image. Those that have it already are left alone: no script runs again."""
        if new := {name: image for name, image in images.items() if self.image_of(name) != image}:
            self.status = "SystemUpdating"
            self.updates |= dict.fromkeys(new, "Pending")
            self.region.world.clock.start(self._update_software(new))

    def _update_software(self, images: dict[str, str]) -> Process:
        for name, image in images.items():
            before, self.images[name], self.updates[name] = self.image_of(name), image, "InProgress"
            for node in self.of_group(name):
                node.become("SystemUpdating")
                yield self.region.seconds("node.update")
                if node.removed:
                    continue
                works = node.run_lifecycle()
                node.image = image if works else before
                node.become("Running")
                if not works:
                    self.updates[name] = "RollbackInProgress"
                    break
            if self.updates[name] == "RollbackInProgress":
                self.images[name], self.updates[name] = before, "RollbackComplete"
                self.failure = "Lifecycle scripts did not run successfully."
            else:
                self.updates[name] = "Succeeded"
        while self.described != "SystemUpdating":  # as in _update
            yield 0.01
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
        yield from self.region.until_over("node.reboot")
        if not node.removed:
            node.become("Running")  # no lifecycle script: it does not run on a reboot

    def remove(self, nodes: list[Node]) -> None:
        for node in nodes:
            self.specifications[node.group]["InstanceCount"] -= 1
        self.region.world.clock.start(shut_down(nodes))

    def delete(self) -> None:
        self.region.world.clock.start(self._delete())

    def _delete(self) -> Process:
        yield self.region.seconds("cluster.delete.shown")
        self.status = "Deleting"
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
            "AutoPatchConfig": _patch_details(group.get("AutoPatchConfig")),
            "SoftwareUpdateStatus": self.updates.get(name),
            "TargetStateCount": sum(node.present and node.image == self.image_of(name) for node in self.of_group(name)),
            **_image_details(self.image_of(name)),
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


def _patch_details(config: dict[str, Any] | None) -> dict[str, Any] | None:
    """ClusterAutoPatchConfigDetails: HyperPod sets a date itself when there is a patch, or takes the requested one."""
    if config is None:
        return None
    date = config.get("PatchSchedule")
    return {key: value for key, value in config.items() if key != "PatchSchedule"} | {"CurrentPatchSchedule": date}


def _image_details(image: str) -> dict[str, Any]:
    field = "ImageId" if image.startswith("ami-") else "ImageReleaseVersion"
    return {f"Current{field}": image, f"Desired{field}": image}


def find(region: Region, name: str) -> Cluster:
    for cluster in region.clusters.values():
        if name in (cluster.name, cluster.arn):
            return cluster
    arn = name if name.startswith("arn:") else f"arn:aws:sagemaker:{region.name}:{ACCOUNT}:cluster/{name}"
    raise AwsError("ResourceNotFound", f"Cluster with name {arn} could not be found.")
