"""A HyperPod node: launched, its lifecycle script run (and logged to CloudWatch), running, gone."""

import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from tests.aws.clock import Process

if TYPE_CHECKING:
    from tests.aws.clusters import Cluster

# Wording from AWS's troubleshooting page and from messages that users quote.
_LIFECYCLE_FAILED = (
    'Instance {} failed to provision with the following error: "Lifecycle scripts did not run successfully. Ensure the '
    "scripts exist in provided S3 path, are accessible, and run without errors. Please see CloudWatch logs for "
    'lifecycle script execution details." Note that multiple instances may be impacted.'
)
_NO_CAPACITY = (
    "We currently do not have sufficient capacity to launch new {} instances. Please try again later or use a "
    "different instance type."
)
_PRESENT = ("Running", "SystemUpdating")


class Node:
    def __init__(self, cluster: "Cluster", group: str) -> None:
        self.cluster, self.group = cluster, group
        self.logical_id = secrets.token_hex(8)
        self.id = ""  # until AWS has launched an instance
        self.status, self.message = "Pending", ""
        self.listed = ""  # the status that ListClusterNodes last answered
        self.launched: datetime | None = None
        self.address = ""
        self.image = cluster.image_of(group)
        self.removed = False
        self._specification = cluster.specifications[group]

    @property
    def specification(self) -> dict[str, Any]:
        """Its group's, or what that was before the group was removed."""
        self._specification = self.cluster.specifications.get(self.group, self._specification)
        return self._specification

    @property
    def present(self) -> bool:
        return self.status in _PRESENT

    def launch(self) -> bool:
        """Launch it; False when AWS has no capacity."""
        region, kind = self.cluster.region, self.specification["InstanceType"]
        limit = region.world.scenario.capacity.get(kind)
        if limit is not None and region.capacity_taken[kind] >= limit:
            return False
        region.capacity_taken[kind] += 1
        self.id = f"i-{secrets.token_hex(9)[:17]}"
        self.launched = datetime.now(timezone.utc)
        number = self.cluster.next_address()
        self.address = f"10.1.{number // 250}.{number % 250 + 4}"
        return True

    def terminate(self) -> None:
        """End its instance and free the capacity that it held."""
        if self.id:
            self.cluster.region.capacity_taken[self.specification["InstanceType"]] -= 1
        self.id, self.launched, self.address = "", None, ""

    def become(self, status: str, message: str = "") -> None:
        self.status, self.message, self.listed = status, message, ""
        if status == "Failure":
            where = f"in Cluster {self.cluster.name} and InstanceGroup {self.group}"
            self.cluster.event(f"Failed to provision EC2 Instance {where}", self, message)
            self.cluster.event(f"Instance creation {where} failed", self)
        else:
            self.cluster.event(f"Node {self.id or self.logical_id} is {status}. {message}".strip(), self)

    def lack_capacity(self) -> None:
        """With continuous provisioning it stays Pending, without a message; only events have the reason."""
        self.become("Failure", _NO_CAPACITY.format(self.specification["InstanceType"]))
        if self.cluster.continuous:
            self.status, self.message = "Pending", ""

    def run_lifecycle(self) -> bool:
        script = self.cluster.region.world.scenario.lifecycle.get(self.group, {})
        fails = bool(script.get("exit", 0)) and script.setdefault("times", 1) > 0
        if fails:
            script["times"] -= 1
        lines = script.get("lines", ["Lifecycle script started"])
        end = f"Lifecycle script exited with code {script['exit']}" if fails else "Lifecycle scripts succeeded"
        self._log([*lines, end])
        return not fails

    def _log(self, lines: Sequence[str]) -> None:
        logs, group = self.cluster.region.client("logs"), self.cluster.log_group
        stream, now = f"LifecycleConfig/{self.group}/{self.id}", int(time.time() * 1000)
        with suppress(logs.exceptions.ResourceAlreadyExistsException):
            logs.create_log_group(logGroupName=group)
        with suppress(logs.exceptions.ResourceAlreadyExistsException):
            logs.create_log_stream(logGroupName=group, logStreamName=stream)
        events = [{"timestamp": now + index, "message": line} for index, line in enumerate(lines)]
        logs.put_log_events(logGroupName=group, logStreamName=stream, logEvents=events)

    def summary(self) -> dict[str, Any]:
        return {
            "InstanceGroupName": self.group,
            "InstanceId": self.id,
            "NodeLogicalId": self.logical_id,
            "InstanceType": self.specification["InstanceType"],
            "LaunchTime": self.launched,
            "PrivateDnsHostname": self.hostname or None,
            "InstanceStatus": {"Status": self.status, "Message": self.message},
        }

    @property
    def hostname(self) -> str:
        """Once it has an address, and with the domain of its region."""
        return self.address and f"ip-{self.address.replace('.', '-')}.{self.cluster.region.name}.compute.internal"


def provision(nodes: list[Node]) -> "Process":
    """Bring new nodes to Running together; those that fail end as Failure, with AWS's message."""
    if not nodes:
        return
    region = nodes[0].cluster.region
    waiting = [node for node in nodes if not node.launch()]
    yield region.seconds("node.launch")
    yield region.seconds("node.lifecycle")
    nodes = [node for node in nodes if node not in waiting and not node.removed]
    for node in nodes:
        if not node.run_lifecycle():
            node.become("Failure", _LIFECYCLE_FAILED.format(node.id))
        else:
            node.become("Running")
    if waiting:
        yield region.seconds("capacity.wait")
    for node in waiting:
        if not node.removed:
            node.lack_capacity()


def shut_down(nodes: list[Node]) -> "Process":
    """Remove nodes; when this returns, a removed node has left its cluster."""
    for node in nodes:
        node.removed = True
    if nodes:
        yield nodes[0].cluster.region.seconds("node.shutdown.shown")
    for node in nodes:
        node.become("ShuttingDown")
    if nodes:
        yield nodes[0].cluster.region.seconds("node.shutdown")
    for node in nodes:
        node.terminate()
        node.cluster.nodes.remove(node)
