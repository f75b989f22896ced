"""One cluster in AWS: what every command of `hyperpod-ft cluster` asks about it, and how they wait for it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

from hyperpod_ft.aws.cluster_reference import ClusterReference
from hyperpod_ft.aws.hyperpod import api
from hyperpod_ft.aws.hyperpod.api import HyperPodCluster
from hyperpod_ft.aws.hyperpod.group_roles import GroupRoles
from hyperpod_ft.aws.hyperpod.nodes import Node, list_nodes
from hyperpod_ft.aws.hyperpod.waiting import Awaited, ClusterWatch
from hyperpod_ft.aws.session import Session, explained
from hyperpod_ft.aws.ssh.ssm import AwsCli
from hyperpod_ft.aws.stack.events import describe
from hyperpod_ft.aws.wait_for_change import Observed, Seen, wait_for_change
from hyperpod_ft.config.cluster_config import ClusterConfig, stack_name
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import PrintLine


@dataclass(frozen=True)
class ClusterAccess:
    """Methods raise UserError, and botocore's errors, which `explained` turns into UserError."""

    target: ClusterReference
    session: Session
    report: PrintLine

    @classmethod
    def of(cls, target: ClusterReference, profile: str | None, report: PrintLine) -> "ClusterAccess":
        return cls(target, Session(target.region, profile), report)

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def config(self) -> ClusterConfig | None:
        """The cluster file, unless the cluster is given by its name."""
        return self.target.config

    @property
    def region(self) -> str:
        return str(self.sagemaker.meta.region_name)

    @property
    def sagemaker(self) -> Any:
        return self.session.client("sagemaker")

    @property
    def aws_cli(self) -> AwsCli:
        return AwsCli(self.region, self.session.profile)

    def explained(self) -> AbstractContextManager[None]:
        return explained(f"cluster {self.name}")

    def cluster(self) -> HyperPodCluster:
        """The cluster, which must exist."""
        cluster = api.find(self.sagemaker, self.name)
        if cluster is None and (stack := self._stack()):
            raise UserError(
                f"no cluster {self.name!r} in {self.region}, but its stack {stack['StackName']} exists"
                f" ({stack['StackStatus']}) and costs money",
                "continue with `hyperpod-ft cluster create`, or remove it with"
                f" `hyperpod-ft cluster delete {self.name}`",
            )
        return cluster or api.require(self.sagemaker, self.name)

    def description(self) -> dict[str, Any]:
        """DescribeCluster's answer; empty if the cluster does not exist."""
        return api.describe(self.sagemaker, self.name) or {}

    def nodes(self) -> list[Node]:
        return list_nodes(self.sagemaker, self.name)

    def group_roles(self, cluster: HyperPodCluster) -> GroupRoles:
        return GroupRoles.of(cluster, self.config)

    def watch(self) -> ClusterWatch:
        return ClusterWatch(self.sagemaker, self.session.client("logs"), self.target, self.report)

    def wait(self, minutes: float, awaited: Awaited) -> HyperPodCluster:
        """Wait until the cluster is complete and as awaited."""
        with self.explained():
            return self.watch().until_complete(minutes * 60, awaited)

    def wait_for_change(
        self, look: Callable[[], Seen[Observed]], minutes: float, command: str
    ) -> tuple[Observed, bool]:
        """See `wait_for_change.wait_for_change`; `command` is one of `hyperpod-ft cluster`."""

        def explained_look() -> Seen[Observed]:
            with self.explained():
                return look()

        return wait_for_change(
            explained_look,
            self.report,
            timeout_seconds=minutes * 60,
            command=f"hyperpod-ft cluster {command} {self.target.arguments}",
        )

    def _stack(self) -> dict[str, Any] | None:
        """The cluster's stack; None without one, or without permission to describe it."""
        with suppress(self.session.client("cloudformation").exceptions.ClientError):
            return describe(self.session.client("cloudformation"), stack_name(self.name))
        return None
