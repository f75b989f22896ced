"""Who logs in to a cluster's nodes, and by which ssh route. Functions raise UserError."""

import json
from pathlib import Path

from hyperpod_ft.aws.cluster.access import ClusterAccess
from hyperpod_ft.aws.hyperpod import lifecycle_files
from hyperpod_ft.aws.s3 import small_objects
from hyperpod_ft.aws.ssh import choice, connect, key
from hyperpod_ft.aws.ssh.connect import SshRequest, SshRoute
from hyperpod_ft.config.cluster_config import User
from hyperpod_ft.errors import UserError


def login_user(access: ClusterAccess, identity: Path | None) -> str:
    """Who has the caller's key on the nodes. `identity`: a key file; None: the usual one."""
    users = access.config.users if access.config else _users(access)
    return choice.login_user(users, key.find(identity, Path.home() / ".ssh").line)


def ssh_route(access: ClusterAccess, request: SshRequest) -> SshRoute:
    """The ssh route to the requested node."""
    with access.explained():
        cluster, nodes, aws_cli = access.cluster(), access.nodes(), access.aws_cli
    return connect.choose_route(cluster, nodes, access.group_roles(cluster), aws_cli, request, Path.home())


def _users(access: ClusterAccess) -> tuple[User, ...]:
    """The users in the lifecycle scripts' settings; none if the cluster has other scripts."""
    with access.explained():
        s3, groups = access.session.client("s3"), access.cluster().groups
        folder = next((group.lifecycle_uri for group in groups), "")
        try:
            found = small_objects.read(s3, folder, lifecycle_files.SETTINGS) if folder else None
        except UserError as error:
            raise UserError(error.problem, f"{error.remedy}, or pass --user or the cluster file") from None
    try:
        return tuple(User.model_validate(user) for user in json.loads(found or b"{}").get("users", []))
    except ValueError:  # of JSON or of pydantic
        raise UserError(
            f"{folder}/{lifecycle_files.SETTINGS}: its users were not written by `cluster create`",
            "pass --user or the cluster file",
        ) from None
