"""The operations of `hyperpod-ft cluster`: send requests to AWS, wait, report progress."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ft.aws.cluster.access import ClusterAccess
from hyperpod_ft.aws.cluster.create import create
from hyperpod_ft.aws.cluster.remove import remove
from hyperpod_ft.aws.hyperpod import api, cluster_logs, events, lifecycle_files
from hyperpod_ft.aws.hyperpod.api import Cluster
from hyperpod_ft.aws.hyperpod.events import Event
from hyperpod_ft.aws.hyperpod.group_roles import Roles
from hyperpod_ft.aws.hyperpod.nodes import INSTANCE_ID, Node
from hyperpod_ft.aws.hyperpod.waiting import Awaited
from hyperpod_ft.aws.s3 import small_objects
from hyperpod_ft.aws.ssh import connect as ssh
from hyperpod_ft.aws.ssh import key as ssh_key
from hyperpod_ft.aws.ssh.choice import login_user
from hyperpod_ft.aws.ssh.config import SshFiles
from hyperpod_ft.aws.ssh.connect import SshRequest, SshRoute
from hyperpod_ft.aws.stack.stack import Remaining
from hyperpod_ft.aws.validation.validate import ValidationResult, validate_account, validate_offline
from hyperpod_ft.config.cluster_config import ClusterConfig, User
from hyperpod_ft.errors import UserError


@dataclass(frozen=True)
class ClusterOverview:
    """A cluster as it is."""

    cluster: Cluster
    nodes: list[Node]
    missing: dict[str, str]  # why groups have fewer instances than requested, by group, if HyperPod reports it
    warnings: dict[str, str]  # of the lifecycle scripts about Slurm, by instance id


@dataclass(frozen=True)
class ClusterOperations:
    """The operations on one cluster. Methods raise UserError; durations are in minutes, None means do not wait."""

    access: ClusterAccess

    def create(self, config: ClusterConfig, timeout: float | None) -> Cluster | None:
        """Validate, then create what is missing. Returns the complete cluster, or None without waiting."""
        found = self.validate(config)
        for finding in found.findings:
            self.access.report(str(finding))
        if found.has_errors:
            raise UserError(f"cluster {config.name}: validation failed, nothing was created", "fix the errors above")
        requested = create(config, self.access)
        return None if timeout is None else self.access.wait(timeout, Awaited(targets=requested))

    def validate(self, config: ClusterConfig) -> ValidationResult:
        """Run every check; changes nothing."""
        offline = validate_offline(config)
        return offline + validate_account(config, self.access.session.client, offline.findings)

    def status(self) -> ClusterOverview:
        with self.access.explained():
            cluster, nodes = self.access.cluster(), self.access.nodes()
        missing = events.why_missing(self.access.sagemaker, cluster)
        warnings = cluster_logs.slurm_warnings(self.access.session.client("logs"), cluster, nodes)
        return ClusterOverview(cluster, nodes, missing, warnings)

    def nodes(self) -> list[Node]:
        with self.access.explained():
            self.access.cluster()
            return self.access.nodes()

    def events(self, group: str | None, node: str | None, limit: int) -> list[Event]:
        """The newest events, the oldest of them first, with the reasons of what failed."""
        with self.access.explained():
            cluster = self.access.cluster()
            if not cluster.continuous:
                raise UserError(
                    f"cluster {cluster.name} has no events: HyperPod keeps them with continuous provisioning only",
                    "see `hyperpod-ft cluster status` and `hyperpod-ft cluster logs`",
                )
            if node and not INSTANCE_ID.fullmatch(node):  # HyperPod takes no other, and may have shut it down
                node = api.find_node(self.access.nodes(), node).instance_id
            found = events.newest(self.access.sagemaker, cluster.name, limit, group, node)
            if group and not found:
                cluster.group(group)
            return [events.with_reason(self.access.sagemaker, cluster.name, event) for event in reversed(found)]

    def lifecycle_log(self, name: str | None, follow: bool) -> Iterator[str]:
        """The lines of a node's lifecycle log; without a name, of the node that wrote last."""
        with self.access.explained():
            cluster, logs = self.access.cluster(), self.access.session.client("logs")
            streams = cluster_logs.lifecycle_streams(logs, cluster)
            if name is not None:
                named = [node for node in self.access.nodes() if name in (node.instance_id, node.hostname)]
                streams = [cluster_logs.stream_of(node) for node in named] or [
                    stream for stream in streams if stream.rpartition("/")[2] == name
                ]
            if not streams:
                whose = f"node {name!r}" if name else "any node"
                raise UserError(
                    f"cluster {cluster.name}: no lifecycle log for {whose}",
                    "list nodes with `hyperpod-ft cluster nodes`; a log appears a few minutes after its node starts",
                )
            self.access.report(f"{cluster_logs.log_group(cluster)} {streams[0]}")
            yield from cluster_logs.lines(logs, cluster, streams[0], follow)

    def login_user(self, identity: Path | None) -> str:
        """Who has the caller's key on the nodes. `identity`: a key file; None: the usual one."""
        users = self.access.config.users if self.access.config else self._users()
        return login_user(users, ssh_key.find(identity, Path.home() / ".ssh").line)

    def _users(self) -> tuple[User, ...]:
        """The users in the lifecycle scripts' settings; none if the cluster has other scripts."""
        with self.access.explained():
            s3, groups = self.access.session.client("s3"), self.access.cluster().groups
            folder = next((group.lifecycle_uri for group in groups), "")
            try:
                found = small_objects.read(s3, folder, lifecycle_files.SETTINGS) if folder else None
            except UserError as error:
                raise UserError(error.problem, f"{error.remedy}, or pass --user or the cluster file") from None
        try:
            return tuple(User.model_validate(user) for user in json.loads(found or b"{}").get("users", []))
        except ValueError:  # of JSON or of pydantic
            raise UserError(
                f"{folder}/{lifecycle_files.SETTINGS}: its users are not as `cluster create` writes them",
                "pass --user or the cluster file",
            ) from None

    def ssh_route(self, request: SshRequest) -> SshRoute:
        """The ssh route to the requested node."""
        with self.access.explained():
            cluster, nodes, aws_cli = self.access.cluster(), self.access.nodes(), self.access.aws_cli
        return ssh.choose_route(cluster, nodes, Roles.of(cluster, self.access.config), aws_cli, request, Path.home())

    def delete(self, delete_data: bool, timeout: float) -> Remaining:
        config = self.access.config
        if config is not None and config.existing is not None and delete_data:
            raise UserError(
                "--delete-data: the file system and the bucket are your own (`existing`)",
                "leave --delete-data out; delete them with the AWS CLI",
            )
        left = remove(self.access, delete_data=delete_data, timeout_seconds=timeout * 60)
        SshFiles(self.access.name, Path.home()).forget()
        return left
