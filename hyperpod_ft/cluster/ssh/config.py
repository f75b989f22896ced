"""The kit's own ssh configuration of a cluster, in ~/.ssh/hyperpod-ft/<cluster>/.

    hosts         Host blocks: <cluster>, and <cluster>.<group> for each group; others may include it
    config        for `ssh -F`: the same, then the user's and the system's settings for everything it does not set
    nodes/<id>    known host keys of one instance
    known/<host>  a link to the file of the instance that the host name last connected to

A replaced node has new host keys, so known keys belong to an instance, not to a name: proxy.py finds the node of a
connection and points the link at its file before ssh reads any key (ssh reads known keys only after the server has
spoken, through the proxy). ssh therefore accepts a new instance as unknown, without an alarm, but refuses a changed
key of the same instance.
"""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.cluster.ssh.ssm import AwsCli
from hyperpod_ft.errors import UserError

_HEADER = """\
# Cluster {cluster}. hyperpod-ft rewrites this file with every `cluster ssh`.
# To make these hosts known to ssh, scp, rsync and VS Code, make this the first line of ~/.ssh/config:
#   Include ~/.ssh/hyperpod-ft/*/hosts
"""
# IdentitiesOnly: an agent with many keys reaches the server's limit of attempts before it offers the right one.
# ServerAliveInterval: Session Manager ends idle sessions, after 20 minutes by default.
_COMMON = """\
Host {hosts}
    User {user}
    IdentityFile {identity}
    IdentitiesOnly yes
    HostKeyAlias {cluster}
    StrictHostKeyChecking accept-new
    UpdateHostKeys no
    CheckHostIP no
    CanonicalizeHostname no
    ServerAliveInterval 60
"""
_HOST = """\
Host {hosts}
    ProxyCommand {proxy}
    UserKnownHostsFile {known_hosts}
"""
_OTHERS = """
Match all
    Include {own}
    Include /etc/ssh/ssh_config
"""


# With -m, a file in the current directory of ssh could shadow any module
_PROXY = (
    'import sys; sys.path.remove("") if "" in sys.path else 0; from hyperpod_ft.cluster.ssh import proxy; proxy.main()'
)


@dataclass(frozen=True)
class SshFiles:
    """Every path of a cluster's ssh configuration. `home` is the user's home directory."""

    cluster: str
    home: Path

    @property
    def directory(self) -> Path:
        return self.home / ".ssh" / "hyperpod-ft" / self.cluster

    @property
    def config(self) -> Path:
        return self.directory / "config"

    @property
    def hosts(self) -> Path:
        return self.directory / "hosts"

    def host(self, group: str) -> str:
        return f"{self.cluster}.{group}"

    def node_keys(self, instance_id: str) -> Path:
        return self.directory / "nodes" / instance_id

    def known(self, host: str) -> Path:
        return self.directory / "known" / host

    def uploaded(self, digest: str) -> Path:
        """Exists once a key is on the cluster; from then on one SSM session per connection suffices."""
        return self.directory / "uploaded" / digest

    def make(self) -> None:
        """Create the directories, readable by this user alone."""
        self.home.joinpath(".ssh").mkdir(mode=0o700, parents=True, exist_ok=True)
        for directory in (self.directory.parent, self.directory):
            directory.mkdir(mode=0o700, exist_ok=True)
        for name in ("nodes", "known", "uploaded"):
            self.directory.joinpath(name).mkdir(mode=0o700, exist_ok=True)

    def lead_to(self, host: str, instance_id: str) -> None:
        """Point the known keys of `host` at those of this instance."""
        self.make()
        keys, link = self.node_keys(instance_id), self.known(host)
        if link.is_symlink() and link.readlink() == keys:
            return
        fresh = link.with_name(f".{link.name}.{os.getpid()}")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(keys)
        fresh.replace(link)

    def write(self, aws_cli: AwsCli, user: str, identity: Path, login_group: str, groups: Iterable[str]) -> None:
        """Write hosts and config atomically, readable by this user alone."""
        self.make()
        hosts = self.hosts_text(aws_cli, user, identity, login_group, groups)
        publish.write_text(self.hosts, hosts, 0o600)
        publish.write_text(self.config, hosts + _OTHERS.format(own=self._own_config()), 0o600)

    def _own_config(self) -> str:
        path = str(self.home / ".ssh" / "config")
        # Include expands patterns, and in newer versions of ssh tokens; ssh takes ~ from the password file, not $HOME
        return f'"{path}"' if re.fullmatch(r"[\w/., @+=-]+", path) else "~/.ssh/config"

    def hosts_text(self, aws_cli: AwsCli, user: str, identity: Path, login_group: str, groups: Iterable[str]) -> str:
        """The Host blocks. Names and paths are literal: ssh passes tokens such as %h to a shell unquoted."""
        names = {login_group: f"{self.cluster} {self.host(login_group)}"}
        names |= {group: self.host(group) for group in groups if group != login_group}
        blocks = [
            _HOST.format(
                hosts=name,
                proxy=proxy_command(aws_cli, self.cluster, "--group", group),
                # both names of the login group share one link
                known_hosts=quoted(self.known(self.host(group))),
            )
            for group, name in names.items()
        ]
        common = _COMMON.format(
            hosts=" ".join(names.values()), user=user, identity=quoted(identity), cluster=self.cluster
        )
        return "\n".join([_HEADER.format(cluster=self.cluster), *blocks, common])

    def forget(self) -> None:
        """Remove all files: the cluster no longer exists."""
        if self.directory.is_dir():
            shutil.rmtree(self.directory)


def proxy_command(aws_cli: AwsCli, cluster: str, *which: str) -> str:
    """ssh's ProxyCommand, as a line for the user's shell. `which`: --group or --node, and its value."""
    return shlex.join([sys.executable, "-c", _PROXY, cluster, *which, *aws_cli.arguments()]).replace("%", "%%")


def quoted(path: Path) -> str:
    """A path as one argument in an ssh configuration. Raises UserError for a path that its syntax cannot express."""
    if any(mark in str(path) for mark in ('"', "\n", "\\", "${")):
        raise UserError(f"{path}: ssh's configuration cannot express this path", "use one without quotes, \\ or ${")
    return '"' + str(path).replace("%", "%%") + '"'
