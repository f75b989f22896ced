"""One cluster in AWS: what every command of `hyperpod-ft cluster` asks about it, how they wait for it, who logs in."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hyperpod_ft.aws.s3 import objects
from hyperpod_ft.aws.session import Session, explained
from hyperpod_ft.aws.stacks import describe
from hyperpod_ft.cluster.config import ClusterConfig, ClusterReference, stack_name
from hyperpod_ft.cluster.hyperpod import api, lifecycle_files, waiting
from hyperpod_ft.cluster.hyperpod.api import GroupRoles, HyperPodCluster, Node, list_nodes
from hyperpod_ft.cluster.hyperpod.waiting import Awaited, ClusterWatch, Observed, Seen
from hyperpod_ft.cluster.sections import User
from hyperpod_ft.cluster.ssh import connect, key
from hyperpod_ft.cluster.ssh.ssm import AwsCli
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import PrintLine


@dataclass(frozen=True)
class ClusterAccess:
    """Methods, and functions of it, raise UserError, and botocore's errors: commands turn these into UserError, once,
    with `explained`."""

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

    @cached_property
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

    def nodes(self) -> list[Node]:
        return list_nodes(self.sagemaker, self.name)

    def changeable(self, *groups: str) -> HyperPodCluster:
        """The cluster. Raises UserError if it has no such groups, or if one is the controller's."""
        cluster = self.cluster()
        for group in groups:
            if cluster.group(group).name == self.group_roles(cluster).controller:
                raise UserError(f"{group} is the controller group, which always has one instance", "name another group")
        return cluster

    def group_roles(self, cluster: HyperPodCluster) -> GroupRoles:
        return GroupRoles.of(cluster, self.config)

    def watch(self) -> ClusterWatch:
        return ClusterWatch(self.session, self.target, self.report)

    def wait(self, minutes: float | None, awaited: Awaited) -> HyperPodCluster | None:
        """Wait until the cluster is complete and as awaited; None, at once, without a time to wait."""
        return None if minutes is None else self.watch().until_complete(minutes * 60, awaited)

    def wait_for_change(
        self, look: Callable[[], Seen[Observed]], minutes: float, command: str
    ) -> tuple[Observed, bool]:
        """See `waiting.wait_for_change`; `command` is one of `hyperpod-ft cluster`."""
        return waiting.wait_for_change(
            look,
            self.report,
            timeout_seconds=minutes * 60,
            command=f"hyperpod-ft cluster {command} {self.target.arguments}",
        )

    def _stack(self) -> dict[str, Any] | None:
        """The cluster's stack; None without one, or without permission to describe it."""
        with suppress(self.session.client("cloudformation").exceptions.ClientError):
            return describe(self.session.client("cloudformation"), stack_name(self.name))
        return None


def login_user(access: ClusterAccess, identity: Path | None) -> str:
    """Who has the caller's key on the nodes. `identity`: a key file; None: the usual one."""
    users = access.config.users if access.config else _users(access)
    return connect.login_user(users, key.find(identity, Path.home() / ".ssh").line)


def ssh_route(access: ClusterAccess, request: connect.SshRequest) -> connect.SshRoute:
    """The ssh route to the requested node."""
    cluster, nodes = access.cluster(), access.nodes()
    return connect.choose_route(cluster, nodes, access.group_roles(cluster), access.aws_cli, request, Path.home())


def _users(access: ClusterAccess) -> tuple[User, ...]:
    """The users in the lifecycle scripts' settings; none if the cluster has other scripts."""
    s3, groups = access.session.client("s3"), access.cluster().groups
    folder = next((group.lifecycle_uri for group in groups), "")
    try:
        found = objects.read(s3, folder, lifecycle_files.SETTINGS) if folder else None
    except UserError as error:
        raise UserError(error.problem, f"{error.remedy}, or pass --user or the cluster file") from None
    try:
        return tuple(User.model_validate(user) for user in json.loads(found or b"{}").get("users", []))
    except ValueError:  # of JSON or of pydantic
        raise UserError(
            f"{folder}/{lifecycle_files.SETTINGS}: its users were not written by `cluster create`",
            "pass --user or the cluster file",
        ) from None
