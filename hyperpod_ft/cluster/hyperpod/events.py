"""What a cluster tells about itself: its events, and the logs of its nodes.

Events say what HyperPod did to groups and nodes, and why something failed; it keeps them of clusters with continuous
provisioning only. In CloudWatch's log group `/aws/sagemaker/Clusters/<name>/<id>`, the stream
`LifecycleConfig/<group>/<instance id>` has the output of a node's lifecycle scripts.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from hyperpod_ft.aws import log_streams
from hyperpod_ft.aws.log_streams import LogStream
from hyperpod_ft.aws.session import explained
from hyperpod_ft.cluster.hyperpod.api import HyperPodCluster, Node
from hyperpod_ft.errors import UserError

_INFO = "Info"
_PAGE = 100  # ClusterEventMaxResults
_LOOKED_AT = 20  # of a group's newest events, to find out why it lacks instances
_REASONS = ("FailureMessage", "Reason", "Advisory")
_LIFECYCLE = "LifecycleConfig/"
_SLURM_WARNING = "slurm: warning"  # lifecycle/provision/journal.py writes it


@dataclass(frozen=True)
class Event:
    """One event. ListClusterEvents returns no `reason`."""

    id: str
    time: float  # seconds since the epoch
    level: str  # ClusterEventLevel: Info, Warn or Error; empty where HyperPod gives none
    group: str  # empty for an event of the whole cluster
    instance_id: str
    description: str
    reason: str = ""

    @property
    def text(self) -> str:
        """What happened, and why."""
        return f"{self.description}: {self.reason}" if self.reason else self.description

    @property
    def date(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.time))


def newest(client: Any, cluster: str, limit: int, group: str | None = None, node: str | None = None) -> list[Event]:
    """At most `limit` events, the newest first, without reasons; of a group or of an instance id if given."""
    only = {"InstanceGroupName": group, "NodeId": node}
    pages = client.get_paginator("list_cluster_events").paginate(
        ClusterName=cluster,
        **{key: value for key, value in only.items() if value},
        PaginationConfig={"MaxItems": limit, "PageSize": min(limit, _PAGE)},
    )
    return [_event(one) for page in pages for one in page.get("Events", [])]


def with_reason(client: Any, cluster: str, event: Event) -> Event:
    """The event with its reason, which DescribeClusterEvent returns for warnings and errors."""
    if event.level == _INFO:
        return event
    answer = client.describe_cluster_event(ClusterName=cluster, EventId=event.id)
    metadata = answer.get("EventDetails", {}).get("EventDetails", {}).get("EventMetadata", {})
    found = [part[key] for part in metadata.values() for key in _REASONS if part.get(key)]
    return replace(event, reason="; ".join(dict.fromkeys(found)))


def why_missing(client: Any, cluster: HyperPodCluster) -> dict[str, str]:
    """Why groups have fewer instances than requested, by group, where an event tells; or why events cannot be read.

    ListClusterNodes gives no reason for a node that AWS has no capacity for.
    """
    missing = [group.name for group in cluster.groups if group.current < group.target] if cluster.continuous else []
    try:
        with explained("events"):
            found = {name: _failure(client, cluster.name, name) for name in missing}
    except UserError as error:
        return dict.fromkeys(missing, str(error))
    return {name: f"{event.reason or event.description} ({event.date})" for name, event in found.items() if event}


def _failure(client: Any, cluster: str, group: str) -> Event | None:
    """The newest event of a failure, with its reason. HyperPod may report a failure twice, once without a reason."""
    failures = [event for event in newest(client, cluster, _LOOKED_AT, group) if event.level != _INFO]
    explained_ones = (with_reason(client, cluster, event) for event in failures[:2])
    return next((event for event in explained_ones if event.reason), failures[0] if failures else None)


def _event(summary: dict[str, Any]) -> Event:
    return Event(
        id=summary["EventId"],
        time=summary["EventTime"].timestamp(),
        level=summary.get("EventLevel", ""),
        group=summary.get("InstanceGroupName", ""),
        instance_id=summary.get("InstanceId", ""),
        description=summary.get("Description", ""),
    )


def log_group(cluster: HyperPodCluster) -> str:
    return f"/aws/sagemaker/Clusters/{cluster.name}/{cluster.id}"


def lifecycle_logs(logs: Any, cluster: HyperPodCluster) -> list[LogStream]:
    """The logs of every node that ever ran lifecycle scripts, the most recently written first."""
    return log_streams.newest_first(logs, log_group(cluster), _LIFECYCLE)


def lifecycle_log(logs: Any, cluster: HyperPodCluster, node: Node) -> LogStream:
    """The log of a node, which may not exist yet."""
    return LogStream(logs, log_group(cluster), f"{_LIFECYCLE}{node.group}/{node.instance_id}")


def slurm_warnings(logs: Any, cluster: HyperPodCluster, nodes: Sequence[Node]) -> dict[str, str]:
    """What the scripts' step `slurm` warned of when these nodes were provisioned, the last of each, by instance id.

    Instead of them, why CloudWatch cannot be asked.
    """
    found: dict[str, str] = {}
    pages = logs.get_paginator("filter_log_events").paginate(
        logGroupName=log_group(cluster), logStreamNamePrefix=_LIFECYCLE, filterPattern=f'"{_SLURM_WARNING}"'
    )
    try:
        with explained("logs"), suppress(logs.exceptions.ResourceNotFoundException):
            for event in sorted((one for page in pages for one in page["events"]), key=lambda one: one["timestamp"]):
                instance = event["logStreamName"].rpartition("/")[2]
                found[instance] = event["message"].partition(_SLURM_WARNING)[2].partition(": ")[2].rstrip()
    except UserError as error:
        return {"lifecycle log": str(error)}
    return {node.instance_id: found[node.instance_id] for node in nodes if node.instance_id in found}
