"""`hyperpod-ft cluster ssh`: choose a node, and connect to it by ssh through SSM, or by SSM alone."""

import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.cluster.hyperpod.api import GroupRoles, HyperPodCluster, Node, find_node, ssm_target, tally
from hyperpod_ft.cluster.sections import User
from hyperpod_ft.cluster.ssh import key as ssh_key
from hyperpod_ft.cluster.ssh import ssm
from hyperpod_ft.cluster.ssh.config import SshFiles, proxy_command, quoted
from hyperpod_ft.digests import text_sha256
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import PrintLine

IMAGE_USER = "ubuntu"
_SSH_FAILED = 255  # ssh's own exit status; any other is the remote command's


def chosen_node(
    cluster: HyperPodCluster, nodes: list[Node], roles: GroupRoles, node: str | None, group: str | None
) -> Node:
    """The node of this id or host name, or one of this group, or else one to log in to. Raises UserError."""
    if node:
        return by_name(cluster, nodes, node)
    if name := group or roles.entry:
        return in_group(cluster, nodes, name)
    names = ", ".join(known.name for known in cluster.groups)
    raise UserError(f"{cluster.name}: no login or controller group found", f"pass --group with one of: {names}")


def login_user(users: Sequence[User], public_key: str) -> str:
    """The cluster's user whose key this is; the image's own, `ubuntu`, if it has no users.

    Raises UserError if it has users and none has the key: `ubuntu`, who may use sudo, must not accept every key.
    """
    owners = [user.name for user in users if public_key.split()[1] in (key.split()[1] for key in user.public_keys)]
    if owners or not users:
        return owners[0] if owners else IMAGE_USER
    raise UserError(
        "no user of the cluster has your public key",
        f"add it to your public_keys in the cluster file, or pass --user: {', '.join(user.name for user in users)},"
        f" or {IMAGE_USER}, who may use sudo",
    )


def in_group(cluster: HyperPodCluster, nodes: list[Node], name: str) -> Node:
    """The first Running node of exactly this group. Raises UserError if there is no such group or none is Running."""
    group = cluster.group(name)
    members = [node for node in nodes if node.group == group.name]
    running = [node for node in members if node.running]
    if not running:
        others = sorted({node.group for node in nodes if node.running})
        raise UserError(
            f"{cluster.name}: no node of {name} is Running ({tally(members) or 'the group is empty'})",
            "wait for one" + (f", or pass --group with one of: {', '.join(others)}" if others else ""),
        )
    return running[0]


def by_name(cluster: HyperPodCluster, nodes: list[Node], name: str) -> Node:
    """The node of this instance id or host name. Raises UserError if it does not exist or is not Running."""
    node = find_node(nodes, name)
    if not node.running:
        why = f": {node.message}" if node.message else ""
        raise UserError(
            f"{cluster.name}: {node.instance_id} of {node.group} is {node.status}{why}",
            "wait until it is Running, or choose another node",
        )
    return node


@dataclass(frozen=True)
class SshRequest:
    """The options of `cluster ssh`. Raises UserError for an invalid user name."""

    user: str = IMAGE_USER
    group: str | None = None
    node: str | None = None  # instance id or host name
    identity: Path | None = None  # private or public key file
    forwards: tuple[str, ...] = ()  # PORT:HOST:PORT, as ssh's -L
    command: tuple[str, ...] = ()  # run this instead of a shell; joined by spaces and read by a shell, as by ssh

    def __post_init__(self) -> None:
        ssh_key.check_user(self.user)


@dataclass(frozen=True)
class SshRoute:
    """A node, and everything needed to connect to it."""

    cluster: HyperPodCluster
    aws_cli: ssm.AwsCli
    node: Node
    running: int  # how many nodes of its group are Running
    login_group: str  # where the cluster's name leads in the ssh configuration
    files: SshFiles

    @property
    def target(self) -> str:
        return ssm_target(self.cluster.id, self.node)

    @property
    def node_name(self) -> str:
        others = f" (one of {self.running} Running)" if self.running > 1 else ""
        return " ".join(filter(None, (self.node.group, self.node.instance_id, self.node.hostname))) + others


def choose_route(
    cluster: HyperPodCluster, nodes: list[Node], roles: GroupRoles, aws_cli: ssm.AwsCli, request: SshRequest, home: Path
) -> SshRoute:
    """Choose the node. Raises UserError."""
    node = chosen_node(cluster, nodes, roles, request.node, request.group)
    running = sum(one.running and one.group == node.group for one in nodes)
    return SshRoute(cluster, aws_cli, node, running, roles.entry or node.group, SshFiles(cluster.name, home))


def ssh_command(route: SshRoute, request: SshRequest, identity: Path) -> list[str]:
    """The ssh command for exactly this node, even if the configuration's names would lead to another."""
    instance = route.node.instance_id
    command = ["ssh", "-F", str(route.files.config), "-l", request.user]
    command += ["-o", f"IdentityFile={quoted(identity)}"]
    command += ["-o", f"ProxyCommand={proxy_command(route.aws_cli, route.cluster.name, '--node', instance)}"]
    command += ["-o", f"UserKnownHostsFile={quoted(route.files.node_keys(instance))}"]
    if request.forwards:
        command += ["-o", "ExitOnForwardFailure=yes"]
    for forward in request.forwards:
        command += ["-L", forward]
    # nothing after -- is read as an option
    return [*command, "--", route.cluster.name, *request.command]


def preview(route: SshRoute, request: SshRequest) -> str:
    """What `connect` would do. Raises UserError without a key."""
    identity = ssh_key.find(request.identity, route.files.home / ".ssh")
    return f"target   {route.target}\ncommand  {shlex.join(ssh_command(route, request, identity.file))}"


def write_config(route: SshRoute, request: SshRequest) -> str:
    """Write the ssh configuration, for other programs too, and return its Host blocks. Raises UserError."""
    identity = ssh_key.find(request.identity, route.files.home / ".ssh")
    _write(route, request, identity)
    return route.files.hosts.read_text(encoding="utf-8")


def connect(route: SshRoute, request: SshRequest, report: PrintLine) -> int:
    """Upload the key, write the configuration, and run ssh in this terminal. Returns its exit status.

    `report` receives lines of progress; stdout belongs to the remote command. Raises UserError.
    """
    ssm.require("ssh", "aws", "session-manager-plugin")
    identity = ssh_key.find(request.identity, route.files.home / ".ssh")
    command = ssh_command(route, request, identity.file)
    _write(route, request, identity)
    uploaded = _uploaded(route, request, identity)
    if not uploaded.exists():
        if ssh_key.upload(route.aws_cli, route.target, request.user, identity):
            report(f"{request.user} on {route.cluster.name} now accepts the key {identity.file}")
        publish.write_text(uploaded, "", 0o600)
    report(route.node_name)
    status = subprocess.run(command, env=ssm.environment(), check=False).returncode
    if status == _SSH_FAILED:
        uploaded.unlink(missing_ok=True)  # the key may be missing: upload it again next time
        raise UserError(
            f"{route.node.group} {route.node.instance_id}: ssh failed; its message is above",
            "run it again, which also uploads the key again; to connect without sshd and keys: --ssm",
        )
    return status


def shell(route: SshRoute, report: PrintLine) -> int:
    """Open a shell by SSM alone, for nodes whose sshd, keys or /fsx are broken. Returns the AWS CLI's exit status."""
    report(route.node_name)
    return ssm.shell(route.aws_cli, route.target)


def _write(route: SshRoute, request: SshRequest, identity: ssh_key.SshKey) -> None:
    groups = [group.name for group in route.cluster.groups]
    route.files.write(route.aws_cli, request.user, identity.file, route.login_group, groups)


def _uploaded(route: SshRoute, request: SshRequest, identity: ssh_key.SshKey) -> Path:
    # homes are on the shared volume, so an uploaded key serves the whole cluster
    what = "\0".join((route.cluster.id, request.user, identity.line))
    return route.files.uploaded(text_sha256(what)[:32])
