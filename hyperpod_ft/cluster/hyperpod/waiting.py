"""Wait for a cluster, or for a change of it, since boto3 has no waiters; report every change, explain every failure."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

from hyperpod_ft.aws.session import Session, explained
from hyperpod_ft.cluster.config import ClusterReference
from hyperpod_ft.cluster.hyperpod import api, events
from hyperpod_ft.cluster.hyperpod.api import INSTANCE_ID, RUNNING, GroupRoles, HyperPodCluster, Node, list_nodes
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import ChangeReporter, PrintLine, format_minutes, polls

_POLL_SECONDS = 15.0
_POLLS_UNTIL_BEGUN = 8  # after these, HyperPod has nothing to change
_LOG_LINES = 40  # of a failing node's lifecycle log: its end holds the error
_ATTEMPTS = 3  # of a node under continuous provisioning: health checks of EFA often fail once, then pass
_NO_REASON = "HyperPod gave no reason"
_SETTLED = (api.IN_SERVICE, api.FAILED)


@dataclass(frozen=True)
class Awaited:
    """The result of a requested change. HyperPod may still report the state before the request for a while."""

    targets: Mapping[str, int] = field(default_factory=dict)  # number of instances by group
    gone: frozenset[str] = frozenset()  # instance ids

    def reached(self, cluster: HyperPodCluster, nodes: list[Node]) -> bool:
        return self.targets_set(cluster) and self.gone.isdisjoint(node.instance_id for node in nodes)

    def targets_set(self, cluster: HyperPodCluster) -> bool:
        """Whether the groups have the requested targets; after a failed update HyperPod restores the old ones."""
        targets = {group.name: group.target for group in cluster.groups}
        return all(targets.get(name) == count for name, count in self.targets.items())


@dataclass
class ClusterWatch:
    """Follows one cluster and reports each change."""

    session: Session
    target: ClusterReference
    report: PrintLine
    _failed: dict[tuple[str, str], set[str]] = field(default_factory=dict)  # instances, by group and logical id

    def until_complete(self, timeout_seconds: float, awaited: Awaited) -> HyperPodCluster:
        """Wait until every group has its target number of nodes, all of them Running.

        Raises UserError if the cluster or a node fails, after printing the node's lifecycle log, or at the timeout.
        Under continuous provisioning, where HyperPod tries again, a node has failed after three attempts.
        """
        arguments, changing = self.target.arguments, False
        for waited in polls(_POLL_SECONDS):
            if (found := api.find(self._sagemaker, self.name)) is None:
                raise UserError(f"cluster {self.name} no longer exists", "create it again")
            cluster = found
            nodes = list_nodes(self._sagemaker, self.name)
            missing = events.why_missing(self._sagemaker, cluster)
            self._report(cluster, nodes, missing)
            if cluster.status == api.DELETING:
                raise UserError(f"cluster {self.name} is being deleted", "wait until it is deleted")
            if cluster.status == api.FAILED:
                self._explain(cluster, nodes)
                raise UserError(
                    f"cluster {self.name}: failed: {cluster.failure or _NO_REASON}",
                    f"fix the cause, run `hyperpod-ft cluster delete {arguments}` (keeps /fsx), then create it again",
                )
            if changing and cluster.status == api.IN_SERVICE and not awaited.targets_set(cluster):
                self._explain(cluster, nodes)
                raise UserError(
                    f"cluster {self.name}: the update was rolled back: {cluster.failure or _NO_REASON}",
                    "fix the cause, then run the command again",
                )
            changing = cluster.status not in _SETTLED
            failing = [node for node in nodes if node.failed and node.instance_id not in awaited.gone]
            if failing and cluster.status in _SETTLED:
                given_up = self._count_attempts(cluster, failing)
                if given_up or waited >= timeout_seconds:
                    first, *_ = named = given_up or failing
                    reason = (first.message or _NO_REASON).rstrip(".")
                    raise UserError(
                        f"cluster {self.name}: {_names(named)} failed: {reason}", self._remedy(cluster, first)
                    )
            settled = cluster.complete and all(node.status == RUNNING for node in nodes)
            if settled and awaited.reached(cluster, nodes):
                break
            if waited >= timeout_seconds:
                raise UserError(
                    f"cluster {self.name}: after {format_minutes(timeout_seconds)} still"
                    f" {_pending(cluster, nodes, missing)}",
                    ("HyperPod keeps requesting capacity; " if cluster.continuous else "")
                    + f"check: hyperpod-ft cluster status {arguments}; or give up: hyperpod-ft cluster scale"
                    f" {arguments} GROUP COUNT",
                )
        return cluster

    def until_gone(self, timeout_seconds: float) -> None:
        """Delete the cluster as soon as HyperPod accepts that, and wait. Raises UserError on failure or timeout."""
        requested = deleting = False
        for waited in polls(_POLL_SECONDS):
            cluster = api.find(self._sagemaker, self.name)
            if cluster is None:
                break
            deleting = deleting or cluster.status == api.DELETING
            if not deleting and not requested:
                requested = api.delete(self._sagemaker, self.name)
                state = "deletion requested" if requested else f"will be deleted once it is no longer {cluster.status}"
                self._report_change(f"cluster {self.name}", state)
            # it may be deleted before its nodes are listed
            with suppress(self._sagemaker.exceptions.ResourceNotFound):
                self._report(cluster, list_nodes(self._sagemaker, self.name), {})
            # a cluster that had failed before its deletion may be shown as Failed for a moment
            if deleting and cluster.status == api.FAILED:
                raise UserError(
                    f"cluster {self.name}: could not be deleted: {cluster.failure}", "run the same command again"
                )
            if waited >= timeout_seconds:
                raise UserError(
                    f"cluster {self.name}: after {format_minutes(timeout_seconds)} still {cluster.status}",
                    "run the command again to keep waiting; until then everything costs money",
                )
        self.report(f"cluster {self.name}: no longer exists")

    def _report(self, cluster: HyperPodCluster, nodes: list[Node], missing: Mapping[str, str]) -> None:
        self._report_change("cluster", cluster.status)
        for group in cluster.groups:
            self._report_change(group.name, f"{group.current} of {group.target} {group.instance_type}")
        for node in nodes:
            if node.instance_id:
                self._report_change(f"{node.group} {node.instance_id}", _state(node))
        for name, reason in missing.items():
            self._report_change(f"{name} lacks instances", reason)

    def _count_attempts(self, cluster: HyperPodCluster, failing: list[Node]) -> list[Node]:
        """Report each failed instance, a group's first with its log; returns the nodes that had their last attempt."""
        attempts = _ATTEMPTS if cluster.continuous else 1
        given_up = []
        for node in failing:
            if all(group != node.group for group, _ in self._failed):
                self._explain(cluster, [node])
            failed = self._failed.setdefault((node.group, node.logical_id), set())
            failed.add(node.instance_id)
            if len(failed) >= attempts:
                given_up.append(node)
            else:
                self._report_change(
                    f"{node.group} {node.instance_id} failed",
                    f"attempt {len(failed)} of {attempts}; HyperPod tries again, and bills each attempt",
                )
        return given_up

    def _remedy(self, cluster: HyperPodCluster, node: Node) -> str:
        """A replaced node would fail again in the same scripts; HyperPod does not replace controllers."""
        arguments = self.target.arguments
        if node.group == GroupRoles.of(cluster, self.target.config).controller:
            return f"fix it there: hyperpod-ft cluster ssh {arguments} --ssm; or delete the cluster and create it again"
        stop = f"; to end the attempts: hyperpod-ft cluster scale {arguments} {node.group} COUNT"
        return (
            "if the lifecycle scripts failed, fix the cause and run `hyperpod-ft cluster create` to update them; then"
            f" hyperpod-ft cluster replace-node {arguments} {node.instance_id}" + (stop if cluster.continuous else "")
        )

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def _sagemaker(self) -> Any:
        return self.session.client("sagemaker")

    @cached_property
    def _report_change(self) -> ChangeReporter:
        return ChangeReporter(self.report)

    def _explain(self, cluster: HyperPodCluster, nodes: list[Node]) -> None:
        """Print the end of the failed node's lifecycle log, or why it cannot be read."""
        try:
            with explained("its lifecycle log"):
                self._print_log(self.session.client("logs"), cluster, nodes)
        except UserError as error:
            self.report(str(error))

    def _print_log(self, logs: Any, cluster: HyperPodCluster, nodes: list[Node]) -> None:
        streams = [events.lifecycle_log(logs, cluster, node) for node in nodes if node.failed]
        if not streams:
            # after a rollback the nodes are gone, but their logs remain
            named = INSTANCE_ID.findall(cluster.failure)
            written = events.lifecycle_logs(logs, cluster)
            streams = [stream for stream in written if stream.name.rpartition("/")[2] in named] or written[:1]
        for stream in streams[:1]:
            tail = list(stream.lines(follow=False))[-_LOG_LINES:]
            self.report(f"--- {stream.name}" + (f", last {len(tail)} lines" if tail else ": empty"))
            for line in tail:
                self.report(line)
            self.report("---")


def _state(node: Node) -> str:
    return f"{node.status}: {node.message}" if node.message else node.status


def _names(nodes: list[Node]) -> str:
    return ", ".join(f"{node.group} {node.instance_id}" for node in nodes)


def _pending(cluster: HyperPodCluster, nodes: list[Node], missing: Mapping[str, str]) -> str:
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
    waiting += [f"{group}: {reason}" for group, reason in missing.items()]
    return ", ".join([cluster.status, *short, *waiting])


Observed = TypeVar("Observed")


@dataclass(frozen=True)
class Seen(Generic[Observed]):
    """One look at what changes. `states`: what to report of it, by name."""

    state: Observed
    states: Mapping[str, str]
    begun: bool  # whether it shows the request; at first HyperPod may still answer what was before
    changing: bool


def wait_for_change(
    look: Callable[[], Seen[Observed]], report: PrintLine, *, timeout_seconds: float, command: str
) -> tuple[Observed, bool]:
    """The state once HyperPod has stopped changing it, and whether it ever showed the request.

    `command`: shows the state later. Raises UserError at the timeout.
    """
    begun, report_change = False, ChangeReporter(report)
    for count, waited in enumerate(polls(_POLL_SECONDS), 1):
        seen = look()
        begun = begun or seen.begun
        for name, state in seen.states.items() if begun else ():
            report_change(name, state)
        if not seen.changing and (begun or count >= _POLLS_UNTIL_BEGUN):
            break
        if waited >= timeout_seconds:
            still = "; ".join(f"{name}: still {state}" for name, state in seen.states.items())
            raise UserError(
                f"{still}, after {format_minutes(timeout_seconds)}", f"HyperPod continues; check with `{command}`"
            )
    return seen.state, begun
