"""Waiting for a cluster, since boto3 has no waiter for one: every change is told, every failure explained."""

import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ft.aws.hyperpod import api, cluster_logs
from hyperpod_ft.aws.hyperpod.api import Cluster
from hyperpod_ft.aws.hyperpod.nodes import RUNNING, Node, list_nodes
from hyperpod_ft.aws.session import explained
from hyperpod_ft.errors import UserError

Say = Callable[[str], None]  # takes one line of progress
POLL_SECONDS = 15.0
_LOG_LINES = 40  # of a failing node's lifecycle log: its end holds the error
_INSTANCE_ID = re.compile(r"\bi-[0-9a-f]{8,17}\b")
_SETTLED = (api.IN_SERVICE, api.FAILED)


@dataclass(frozen=True)
class Awaited:
    """What a change is to lead to, besides a complete cluster: HyperPod may show the state before it for a while."""

    targets: Mapping[str, int] = field(default_factory=dict)  # instances each group is to have
    gone: frozenset[str] = frozenset()  # instance ids

    def reached(self, cluster: Cluster, nodes: list[Node]) -> bool:
        return self.asked_of(cluster) and self.gone.isdisjoint(node.instance_id for node in nodes)

    def asked_of(self, cluster: Cluster) -> bool:
        """Whether the cluster is to have these instances, or (again) others."""
        targets = {group.name: group.target for group in cluster.groups}
        return all(targets.get(name) == count for name, count in self.targets.items())


@dataclass
class ClusterWatch:
    """Follows one cluster. `say` gets a line for whatever changed. `words`: how commands name it, for hints."""

    sagemaker: Any
    logs: Any
    name: str
    words: str
    say: Say
    poll_seconds: float = POLL_SECONDS
    _told: dict[str, str] = field(default_factory=dict)

    def until_complete(self, timeout_seconds: float, awaited: Awaited) -> Cluster:
        """Wait until every group has the nodes it is to have, and all of them run.

        Raises UserError when the cluster or a node fails, after telling the node's lifecycle log, or at the timeout.
        """
        deadline, changing = time.monotonic() + timeout_seconds, False
        while True:
            cluster = api.find(self.sagemaker, self.name)
            if cluster is None:
                raise UserError(f"cluster {self.name}: is gone", "create it again")
            nodes = list_nodes(self.sagemaker, self.name)
            self._tell(cluster, nodes)
            if cluster.status == api.DELETING:
                raise UserError(f"cluster {self.name}: is being deleted", "wait until it is gone")
            if cluster.status == api.FAILED:
                self._explain(cluster, nodes)
                raise UserError(
                    f"cluster {self.name}: failed: {cluster.failure or 'HyperPod gives no reason'}",
                    f"correct the cause, `hyperpod-ft cluster delete {self.words}` (keeps /fsx), then create it again",
                )
            if changing and cluster.status == api.IN_SERVICE and not awaited.asked_of(cluster):
                self._explain(cluster, nodes)
                raise UserError(
                    f"cluster {self.name}: went back to what it was: {cluster.failure or 'HyperPod gives no reason'}",
                    "correct the cause, then run the same command again",
                )
            changing = cluster.status not in _SETTLED
            failing = [node for node in nodes if node.failed and node.instance_id not in awaited.gone]
            if failing and cluster.status in _SETTLED:
                self._explain(cluster, failing)
                reason = (failing[0].message or "HyperPod gives no reason").rstrip(".")
                raise UserError(
                    f"cluster {self.name}: {_names(failing)} failed: {reason}", self._mend(cluster, failing[0])
                )
            settled = cluster.complete and all(node.status == RUNNING for node in nodes)
            if settled and awaited.reached(cluster, nodes):
                return cluster
            if time.monotonic() > deadline:
                raise UserError(
                    f"cluster {self.name}: after {_minutes(timeout_seconds)} still {_pending(cluster, nodes)}",
                    f"HyperPod goes on asking; look again: hyperpod-ft cluster status {self.words}; to give up:"
                    f" hyperpod-ft cluster scale {self.words} GROUP COUNT",
                )
            time.sleep(self.poll_seconds)

    def until_gone(self, timeout_seconds: float) -> None:
        """Have the cluster deleted, as soon as HyperPod does that, and wait. Raises UserError when that fails, or at
        the timeout."""
        deadline, asked, deleting = time.monotonic() + timeout_seconds, False, False
        while cluster := api.find(self.sagemaker, self.name):
            deleting = deleting or cluster.status == api.DELETING
            if not deleting and not asked:
                asked = api.delete(self.sagemaker, self.name)
                state = "asked to be deleted" if asked else f"is deleted once it is no longer {cluster.status}"
                self._tell_change(f"cluster {self.name}", state)
            # it may be gone when its nodes are asked for
            with suppress(self.sagemaker.exceptions.ResourceNotFound):
                self._tell(cluster, list_nodes(self.sagemaker, self.name))
            # one that had failed before it was to be deleted may be shown so for a moment
            if deleting and cluster.status == api.FAILED:
                raise UserError(
                    f"cluster {self.name}: could not be deleted: {cluster.failure}", "run the same command again"
                )
            if time.monotonic() > deadline:
                raise UserError(
                    f"cluster {self.name}: after {_minutes(timeout_seconds)} still {cluster.status}",
                    "run the same command again: it goes on waiting; until then everything costs money",
                )
            time.sleep(self.poll_seconds)
        self.say(f"cluster {self.name}: is not there (any more)")

    def _tell(self, cluster: Cluster, nodes: list[Node]) -> None:
        self._tell_change("cluster", cluster.status)
        for group in cluster.groups:
            self._tell_change(group.name, f"{group.current} of {group.target} {group.instance_type}")
        for node in nodes:
            if node.instance_id:
                self._tell_change(f"{node.group} {node.instance_id}", _state(node))
        for name, reason in _lacking(nodes).items():
            self._tell_change(f"{name} without an instance", reason)

    def _mend(self, cluster: Cluster, node: Node) -> str:
        """A node whose scripts failed would fail again; HyperPod replaces no controller."""
        if cluster.group(node.group).node_type == "Controller":
            return (
                f"mend it there: hyperpod-ft cluster ssh {self.words} --ssm; or delete the cluster and create it again"
            )
        return (
            "when it is the lifecycle scripts, correct the cause and create again, which renews them; then"
            f" hyperpod-ft cluster replace-node {self.words} {node.instance_id}"
        )

    def _tell_change(self, what: str, state: str) -> None:
        if self._told.get(what) != state:
            self._told[what] = state
            self.say(f"{what}: {state}")

    def _explain(self, cluster: Cluster, nodes: list[Node]) -> None:
        """Tell the end of the lifecycle log of the node that failed, or why that cannot be read."""
        try:
            with explained("its lifecycle log"):
                self._tell_log(cluster, nodes)
        except UserError as error:
            self.say(str(error))

    def _tell_log(self, cluster: Cluster, nodes: list[Node]) -> None:
        streams = [cluster_logs.stream_of(node) for node in nodes if node.failed]
        if not streams:
            # of a cluster that was rolled back no nodes are left, but their logs are
            named = _INSTANCE_ID.findall(cluster.failure)
            written = cluster_logs.lifecycle_streams(self.logs, cluster)
            streams = [name for name in written if name.rpartition("/")[2] in named] or written[:1]
        for stream in streams[:1]:
            tail = list(cluster_logs.lines(self.logs, cluster, stream))[-_LOG_LINES:]
            self.say(f"--- {stream}" + (f", its last {len(tail)} lines" if tail else ": nothing was written"))
            for line in tail:
                self.say(line)
            self.say("---")


def _state(node: Node) -> str:
    return f"{node.status}: {node.message}" if node.message else node.status


def _lacking(nodes: list[Node]) -> dict[str, str]:
    """By group, what HyperPod says of nodes that have no instance, each reason once and without what comes and goes."""
    reasons: dict[str, set[str]] = {}
    for node in nodes:
        if not node.instance_id and node.message:
            reasons.setdefault(node.group, set()).add(node.message.rstrip("."))
    return {group: "; ".join(sorted(told)) for group, told in sorted(reasons.items())}


def _names(nodes: list[Node]) -> str:
    return ", ".join(f"{node.group} {node.instance_id}" for node in nodes)


def _pending(cluster: Cluster, nodes: list[Node]) -> str:
    short = [
        f"{group.name} has {group.current} of {group.target}"
        for group in cluster.groups
        if group.current != group.target
    ]
    waiting = [
        f"{node.group} {node.instance_id} is {node.status}"
        for node in nodes
        if node.status != RUNNING and node.instance_id
    ]
    waiting += [f"{group}: {reason}" for group, reason in _lacking(nodes).items()]
    return ", ".join([cluster.status, *short, *waiting])


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes"
