"""FSx for Lustre at its mount point: the right one, mounted at boot, and tested once after each mount.

On the legacy path this step mounts it; on the API-driven path HyperPod does, and this step checks and tests it.

Options: `flock`, because torch, pip and this kit lock files there across nodes; `noatime`, because with the `relatime`
of AWS's guide reading a dataset still writes access times to the metadata server once a day; `nofail`, so that a node
without its file system still boots for inspection (its slurmd does not start: step `slurm`).
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import Sequence

from provision import shared
from provision.errors import NodeError, PassingError
from provision.files import File, difference, write
from provision.mounts import Mount, mount_at
from provision.node import Node
from provision.step import Step

OPTIONS = "noatime,flock"
_FSTAB_OPTIONS = f"{OPTIONS},_netdev,nofail"
# In /run, which a boot empties: records the mount that was tested.
_TESTED = "/run/provision/fsx"


class Fsx(Step):
    name = "fsx"
    needs = ("identify",)
    deadline = 300.0
    attempts = 8

    def needed(self, node: Node) -> bool:
        return node.live

    def missing(self, node: Node) -> Sequence[str]:
        """Raises NodeError if something else is mounted there."""
        mount = _mounted(node)
        lines = difference(node, _fstab(node)) if node.settings.provisioning == "legacy" else []
        if mount is None:
            return [*lines, f"{node.settings.fsx.source} is not mounted at {node.settings.fsx.mount_path}"]
        if difference(node, _tested(mount)):
            return [*lines, f"{node.settings.fsx.mount_path} has not been tested since it was mounted"]
        return [*lines, *(f"{path} left by a killed run" for path in shared.leftovers(node))]

    def do(self, node: Node) -> None:
        if node.settings.provisioning == "legacy":
            write(node, _fstab(node))
        if _mounted(node) is None:
            if node.settings.provisioning == "api":
                where = node.settings.fsx.mount_path
                raise PassingError(f"HyperPod has not mounted {where}", "see FsxLustreConfig of the instance group")
            _mount(node)
        mount = _mounted(node)
        if mount is None:
            raise PassingError(f"mount succeeded, but {node.settings.fsx.mount_path} is not mounted")
        for path in shared.leftovers(node):
            shared.remove(path)
        _test_write(node, mount)
        write(node, _tested(mount))


def _mounted(node: Node) -> Mount | None:
    """The file system, if it is mounted. Raises NodeError if something else is."""
    fsx = node.settings.fsx
    if node.fsx.is_dir():
        # If it is automounted, reading the directory mounts it.
        next(node.fsx.iterdir(), None)
    mount = mount_at(fsx.mount_path, node.path("/proc/self/mountinfo").read_text().splitlines())
    if mount is None:
        return None
    # For tests, on machines without Lustre.
    wanted = os.environ.get("PROVISION_FSX_TYPE", "lustre")
    host, _, name = mount.source.partition("@tcp:/")
    if mount.kind != wanted or name != fsx.mount_name or not _same_host(host, fsx.dns_name):
        found = f"{mount.source} ({mount.kind})"
        raise NodeError(f"{fsx.mount_path}: {found} is mounted there, not {fsx.source}", f"umount {fsx.mount_path}")
    return mount


def _same_host(shown: str, dns_name: str) -> bool:
    """Lustre shows the address that the name resolved to. If it does not resolve now, the mount name must suffice."""
    if shown == dns_name:
        return True
    try:
        return shown in {str(entry[4][0]) for entry in socket.getaddrinfo(dns_name, None)}
    except OSError:
        return True


def _mount(node: Node) -> None:
    fsx = node.settings.fsx
    node.fsx.mkdir(parents=True, exist_ok=True)
    hidden = next(node.fsx.iterdir(), None)
    if hidden is not None:
        what = f"{fsx.mount_path} is not mounted and holds {hidden.name!r}, which mounting would hide"
        raise NodeError(what, "move its content away")
    modules = node.path(f"/lib/modules/{os.uname().release}")
    if modules.is_dir() and "lustre" not in node.path("/proc/filesystems").read_text().split():
        node.run("modprobe", "lustre")
    node.run("mount", "-t", "lustre", "-o", OPTIONS, fsx.source, fsx.mount_path)


def _fstab(node: Node) -> File:
    """/etc/fstab with one line for the mount point. Raises NodeError if it has another kind of file system."""
    fsx = node.settings.fsx
    ours = f"{fsx.source} {fsx.mount_path} lustre {_FSTAB_OPTIONS} 0 0"
    path = node.path("/etc/fstab")
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        fields = line.split("#")[0].split()
        if len(fields) < 3 or fields[1] != fsx.mount_path:
            lines.append(line)
        elif fields[2] != "lustre":
            raise NodeError(
                f"/etc/fstab: {fields[0]} ({fields[2]}) is configured for {fsx.mount_path}", "remove that line"
            )
    at = next((number for number, line in enumerate(lines) if line == ours), len(lines))
    return File("/etc/fstab", "\n".join([*lines[:at], ours, *lines[at:]]) + "\n")


def _test_write(node: Node, mount: Mount) -> None:
    """Write, read, lock and remove a file. Raises PassingError on failure, but only reports that there are no locks."""
    text = f"{node.identity.instance_id}\n"
    file = shared.folder(node) / f"written-by-{node.identity.instance_id}"
    try:
        shared.publish_text(node, file, text)
        if file.read_text() != text:
            raise PassingError(f"{file}: read back different content than written")
        if not _locks(file, mount):
            fsx = node.settings.fsx
            again = f"umount {fsx.mount_path} && mount -t lustre -o {OPTIONS} {fsx.source} {fsx.mount_path}"
            node.say(f"{fsx.mount_path} is mounted without flock: jobs that lock files on it will fail; run: {again}")
    except OSError as error:
        where = node.settings.fsx.mount_path
        raise PassingError(
            f"{where} cannot be written to: {error}", "check the file system in the FSx console"
        ) from None
    finally:
        shared.remove(file)


def _locks(file: Path, mount: Mount) -> bool:
    """Whether locks on files work, also between nodes: not with Lustre's options noflock and localflock."""
    with file.open("r+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError:
            return False
    return "localflock" not in mount.options.split(",")


def _tested(mount: Mount) -> File:
    return File(_TESTED, f"{mount.identity} {mount.source}\n")
