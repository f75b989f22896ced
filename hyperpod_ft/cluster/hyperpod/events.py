"""A cluster's events: what HyperPod did to its groups and nodes, and why something failed.

HyperPod keeps events of clusters with continuous provisioning only. `client` is boto3's for sagemaker throughout.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

from hyperpod_ft.aws.session import explained
from hyperpod_ft.cluster.hyperpod.api import HyperPodCluster
from hyperpod_ft.errors import UserError

_INFO = "Info"
_PAGE = 100  # ClusterEventMaxResults
_LOOKED_AT = 20  # of a group's newest events, to find out why it lacks instances
_REASONS = ("FailureMessage", "Reason", "Advisory")


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
