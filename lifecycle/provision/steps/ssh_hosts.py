"""Certificates of ssh host keys: nodes recognize each other by the cluster's own certificate authority.

Each node has the authority sign its host keys, and trusts host keys that it signed. However many nodes there are, each
reads one small file of the shared file system.

Security: the authority's private key is on /fsx, for root alone. A stranger on the network cannot impersonate a node,
but root on any node can. Nodes believe the authority only about host names and addresses like their own (`ip-10-1-*`,
`10.1.*`): it cannot vouch for a host outside. Certificates do not expire; a replaced node's key is gone with its disk.
"""

from __future__ import annotations

import base64
import os
import socket
import stat
import struct
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Sequence

from provision import files, shared, systemd
from provision.errors import NodeError
from provision.files import File
from provision.node import Node
from provision.step import Step

AUTHORITY = "ssh_host_ca"  # the private key, in /fsx/.provision
_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts_hyperpod_ft"
_MARK = "# Written by the step ssh_hosts of hyperpod-ft.\n"
_SECONDS = 10.0


class SshHosts(Step):
    name = "ssh_hosts"
    needs = ("fsx",)

    def __init__(self) -> None:
        self._not_offered = False
        """Whether this attempt (a separate process) could not make sshd offer the certificates."""

    def needed(self, node: Node) -> bool:
        return node.live

    def missing(self, node: Node) -> Sequence[str]:
        """Raises NodeError for an authority that others than root could have made or read."""
        if not _authority(node).exists():
            return [f"no {_authority(node)}"]
        public = _public(node)
        lines = [line for file in _configuration(node, public) for line in files.difference(node, file)]
        unsigned = [key for key in _keys(node) if not _is_signed(node, key, public)]
        lines += [f"{key.name} has no certificate of this cluster for this node" for key in unsigned]
        return lines or ([] if self._not_offered else _not_offered(node))

    def do(self, node: Node) -> None:
        _make_authority(node)
        public = _public(node)
        for key in _keys(node):
            if not _is_signed(node, key, public):
                _sign(node, key)
        for file in _configuration(node, public):
            files.write(node, file)
        _reload(node)
        # Jobs do not need ssh between nodes: without it a node is still a good one.
        for line in _not_offered(node):
            node.say(f"{line}; ssh to this node asks whether to trust it")
            self._not_offered = True


def _authority(node: Node) -> Path:
    return shared.checked_folder(node) / AUTHORITY


def _make_authority(node: Node) -> None:
    """Create it once for the cluster: of several nodes, link(2) succeeds on the first."""
    if _authority(node).exists():
        return
    made = shared.staging(node, AUTHORITY)
    comment = f"host keys of {node.identity.cluster}"
    node.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(made))
    files.sync(made)
    with suppress(FileExistsError):
        os.link(made, _authority(node))
    files.sync_directory(shared.folder(node))
    for left in (made, made.with_name(f"{made.name}.pub")):
        shared.remove(left)


def _public(node: Node) -> str:
    """The authority's public key: its kind and data."""
    authority = _authority(node)
    status = authority.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise NodeError(f"{authority} is not root's alone", "move it away and run provision.sh on every node")
    return " ".join(node.run("ssh-keygen", "-y", "-P", "", "-f", str(authority)).stdout.split()[:2])


def _keys(node: Node) -> list[Path]:
    return sorted(node.path("/etc/ssh").glob("ssh_host_*_key.pub"))


def _certificate(key: Path) -> str:
    return f"/etc/ssh/{key.name[: -len('.pub')]}-cert.pub"


def _names(node: Node) -> list[str]:
    """What other nodes call this one."""
    host = os.uname().nodename
    return list(dict.fromkeys([host, host.split(".")[0], node.identity.address]))


def _is_signed(node: Node, key: Path, public: str) -> bool:
    """Whether the certificate is the authority's, for this key and these names. Format: OpenSSH's PROTOCOL.certkeys.

    It holds the host key's numbers, its names, and the authority's key. Only root can write it, so that its signature
    need not be verified.
    """
    try:
        certificate = _blob(node.path(_certificate(key)).read_text())
    except (FileNotFoundError, ValueError, IndexError):
        return False
    own = _blob(key.read_text())
    (length,) = struct.unpack(">I", own[:4])
    numbers = own[4 + length :]
    names = _packed(b"".join(_packed(name.encode()) for name in _names(node)))
    return all(part in certificate for part in (numbers, names, _packed(_blob(public))))


def _blob(line: str) -> bytes:
    return base64.b64decode(line.split()[1], validate=True)


def _packed(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def _sign(node: Node, key: Path) -> None:
    """Write the certificate of a host key, atomically: ssh-keygen writes it next to a copy of the key."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / key.name
        copy.write_text(key.read_text())
        names = ",".join(_names(node))
        authority = str(_authority(node))
        node.run("ssh-keygen", "-q", "-s", authority, "-I", _names(node)[0], "-h", "-n", names, str(copy))
        text = (Path(folder) / Path(_certificate(key)).name).read_text()
    files.write(node, File(_certificate(key), text))


def _configuration(node: Node, public: str) -> list[File]:
    offered = "".join(f"HostCertificate {_certificate(key)}\n" for key in _keys(node))
    known = f"/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2 {_KNOWN_HOSTS}"
    return [
        File("/etc/ssh/sshd_config.d/hyperpod-ft.conf", _MARK + offered),
        File("/etc/ssh/ssh_config.d/hyperpod-ft.conf", f"{_MARK}Host *\n    GlobalKnownHostsFile {known}\n"),
        File(_KNOWN_HOSTS, f"{_MARK}@cert-authority {_pattern(node)} {public}\n"),
    ]


def _pattern(node: Node) -> str:
    """Host names and addresses of the nodes: in one subnet, whose addresses (/16 or smaller) share two numbers."""
    host, address = os.uname().nodename.split(".")[0], node.identity.address
    return f"{host.rsplit('-', 2)[0]}-*,{'.'.join(address.split('.')[:2])}.*"


def _reload(node: Node) -> None:
    """Have a running sshd read its configuration again. Connections stay."""
    for unit in ("ssh", "sshd"):  # Ubuntu's name, and that of others
        if systemd.show(node, unit, "ActiveState") == "active":
            node.run("systemctl", "reload", unit)
            break
    end = time.monotonic() + _SECONDS
    while _not_offered(node) and time.monotonic() < end:
        time.sleep(0.1)


def _not_offered(node: Node) -> list[str]:
    """One line if this node's sshd runs, and without its certificates; it may also be started later."""
    try:
        socket.create_connection(("127.0.0.1", 22), timeout=5).close()
    except OSError:
        return []
    answer = node.run("ssh-keyscan", "-c", "-T", "5", "127.0.0.1", check=False).stdout
    certificates = [node.path(_certificate(key)).read_text().split()[1] for key in _keys(node)]
    if any(each in answer for each in certificates):
        return []
    return ["sshd does not offer this node's certificates: /etc/ssh/sshd_config must include sshd_config.d/*.conf"]
