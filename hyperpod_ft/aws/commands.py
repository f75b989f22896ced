"""The operations of `hyperpod-ft cluster`: send requests to AWS, wait, report progress."""

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyperpod_ft.aws.cluster_reference import ClusterReference
from hyperpod_ft.aws.create import create
from hyperpod_ft.aws.hyperpod import api, cluster_logs, events, lifecycle_files
from hyperpod_ft.aws.hyperpod.api import Cluster
from hyperpod_ft.aws.hyperpod.events import Event
from hyperpod_ft.aws.hyperpod.nodes import INSTANCE_ID, Node, list_nodes
from hyperpod_ft.aws.hyperpod.waiting import POLL_SECONDS, Awaited, ClusterWatch, Say
from hyperpod_ft.aws.remove import remove
from hyperpod_ft.aws.s3 import small_objects
from hyperpod_ft.aws.session import Session, explained
from hyperpod_ft.aws.ssh import connect as ssh
from hyperpod_ft.aws.ssh import key as ssh_key
from hyperpod_ft.aws.ssh import ssm
from hyperpod_ft.aws.ssh.choice import USUAL_GROUPS, login_user
from hyperpod_ft.aws.ssh.config import SshFiles
from hyperpod_ft.aws.ssh.connect import SshRequest, SshRoute
from hyperpod_ft.aws.stack.events import describe
from hyperpod_ft.aws.stack.stack import POLL_SECONDS as STACK_POLL_SECONDS
from hyperpod_ft.aws.stack.stack import Remaining
from hyperpod_ft.aws.validation.validate import ValidationResult, validate_account, validate_offline
from hyperpod_ft.config.cluster_config import ClusterConfig, User, stack_name
from hyperpod_ft.errors import UserError
from hyperpod_ft.polling import poll_seconds

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Commands:
    """The operations on one cluster. Methods raise UserError; durations are in minutes, None means do not wait."""

    target: ClusterReference
    session: Session
    say: Say
    poll_seconds: float = POLL_SECONDS
    stack_poll_seconds: float = STACK_POLL_SECONDS

    @classmethod
    def of(cls, target: ClusterReference, profile: str | None, say: Say) -> "Self":
        session = Session(target.region, profile or os.environ.get("AWS_PROFILE"))
        return cls(target, session, say, poll_seconds(POLL_SECONDS), poll_seconds(STACK_POLL_SECONDS))

    def create(self, config: ClusterConfig, timeout: float | None) -> Cluster | None:
        """Validate, then create what is missing. Returns the complete cluster, or None without waiting."""
        found = self.validate(config)
        for finding in found.findings:
            self.say(str(finding))
        if found.has_errors:
            raise UserError(f"cluster {config.name}: validation failed, nothing was created", "fix the errors above")
        asked = create(config, self.session, self.say, self.stack_poll_seconds)
        return None if timeout is None else self._wait(timeout, Awaited(targets=asked))

    def validate(self, config: ClusterConfig) -> ValidationResult:
        """Run every check; changes nothing."""
        offline = validate_offline(config)
        return offline + validate_account(config, self.session.client, offline.findings)

    def status(self) -> tuple[Cluster, list[Node]]:
        with self._explained():
            return self._require(), self._nodes()

    def why_missing(self, cluster: Cluster) -> dict[str, str]:
        """Why groups have fewer instances than requested, by group, if HyperPod reports it."""
        return events.why_missing(self._sagemaker, cluster)

    def events(self, group: str | None, node: str | None, limit: int) -> list[Event]:
        """The newest events, the oldest of them first, with the reasons of what failed."""
        with self._explained():
            cluster = self._require()
            if not cluster.continuous:
                raise UserError(
                    f"cluster {cluster.name} has no events: HyperPod keeps them with continuous provisioning only",
                    "see `hyperpod-ft cluster status` and `hyperpod-ft cluster logs`",
                )
            if node and not INSTANCE_ID.fullmatch(node):  # HyperPod takes no other, and may have shut it down
                node = api.find_node(self._nodes(), node).instance_id
            found = events.newest(self._sagemaker, cluster.name, limit, group, node)
            if group and not found:
                cluster.group(group)
            return [events.with_reason(self._sagemaker, cluster.name, event) for event in reversed(found)]

    def lifecycle_log(self, name: str | None, follow: bool) -> Iterator[str]:
        """The lines of a node's lifecycle log; without a name, of the node that wrote last."""
        with self._explained():
            cluster, logs = self._require(), self.session.client("logs")
            streams = cluster_logs.lifecycle_streams(logs, cluster)
            if name is not None:
                there = [
                    cluster_logs.stream_of(node) for node in self._nodes() if name in (node.instance_id, node.hostname)
                ]
                streams = there or [stream for stream in streams if stream.rpartition("/")[2] == name]
            if not streams:
                whose = f"node {name!r}" if name else "any node"
                raise UserError(
                    f"cluster {cluster.name}: no lifecycle log for {whose}",
                    "list nodes with `hyperpod-ft cluster nodes`; a log appears a few minutes after its node starts",
                )
            self.say(f"{cluster_logs.log_group(cluster)} {streams[0]}")
            yield from cluster_logs.lines(logs, cluster, streams[0], follow)

    def login_user(self, identity: Path | None) -> str:
        """Who has the caller's key on the nodes. `identity`: a key file; None: the usual one."""
        users = self.target.config.users if self.target.config else self._users()
        return login_user(users, ssh_key.find(identity, Path.home() / ".ssh").line)

    def _users(self) -> tuple[User, ...]:
        """The users in the lifecycle scripts' settings; none if the cluster has other scripts."""
        with self._explained():
            s3, folder = self.session.client("s3"), next((group.lifecycle_uri for group in self._require().groups), "")
            try:
                found = small_objects.read(s3, folder, lifecycle_files.SETTINGS) if folder else None
            except UserError as error:
                raise UserError(error.problem, f"{error.remedy}, or pass --user or the cluster file") from None
        return tuple(User.model_validate(user) for user in json.loads(found or b"{}").get("users", []))

    def ssh_route(self, request: SshRequest) -> SshRoute:
        """The ssh route to the requested node."""
        config = self.target.config
        usual = tuple(group.name for group in (config.login, config.controller) if group) if config else USUAL_GROUPS
        with self._explained():
            cluster, nodes = self._require(), self._nodes()
            aws_cli = self._aws_cli
        return ssh.choose_route(cluster, nodes, aws_cli, request, Path.home(), usual)

    def delete(self, delete_data: bool, timeout: float) -> Remaining:
        config = self.target.config
        if config is not None and config.existing is not None and delete_data:
            raise UserError(
                "--delete-data: the file system and the bucket are your own (`existing`)",
                "leave --delete-data out; delete them with the AWS CLI",
            )
        with self._explained():
            left = remove(
                self.target.name,
                stack_name(self.target.name),
                self.session,
                self._watch(),
                delete_data=delete_data,
                timeout_seconds=timeout * 60,
                poll_seconds=self.stack_poll_seconds,
            )
        SshFiles(self.target.name, Path.home()).forget()
        return left

    def _wait(self, timeout: float, awaited: Awaited) -> Cluster:
        with self._explained():
            return self._watch().until_complete(timeout * 60, awaited)

    def _watch(self) -> ClusterWatch:
        return ClusterWatch(
            self._sagemaker,
            self.session.client("logs"),
            self.target.name,
            self.target.arguments,
            self.say,
            self.poll_seconds,
        )

    def _require(self) -> Cluster:
        name = self.target.name
        cluster = api.find(self._sagemaker, name)
        if cluster is None and (stack := self._stack()):
            raise UserError(
                f"no cluster {name!r} in {self.region}, but its stack {stack['StackName']} exists"
                f" ({stack['StackStatus']}) and costs money",
                f"continue with `hyperpod-ft cluster create`, or remove it with `hyperpod-ft cluster delete {name}`",
            )
        return cluster or api.require(self._sagemaker, name)

    def _stack(self) -> dict[str, Any] | None:
        """The cluster's stack; None without one, or without permission to describe it."""
        with suppress(self.session.client("cloudformation").exceptions.ClientError):
            return describe(self.session.client("cloudformation"), stack_name(self.target.name))
        return None

    def _nodes(self) -> list[Node]:
        return list_nodes(self._sagemaker, self.target.name)

    @property
    def region(self) -> str:
        return str(self._sagemaker.meta.region_name)

    @property
    def _aws_cli(self) -> ssm.AwsCli:
        return ssm.AwsCli(self.region, self.session.profile)

    @property
    def _sagemaker(self) -> Any:
        return self.session.client("sagemaker")

    def _explained(self) -> AbstractContextManager[None]:
        return explained(f"cluster {self.target.name}")
