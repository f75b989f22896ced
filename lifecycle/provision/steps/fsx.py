"""FSx for Lustre at its mount point: the right one, mounted again at boot, and written to once after each mount.

On the legacy path this step mounts it; on the API-driven path HyperPod does, and this step looks and tries it out.

Options: `flock`, because torch, pip and this kit lock files there across nodes; `noatime`, because with the `relatime`
of AWS's guide reading a dataset still writes access times to the metadata server once a day; `nofail`, so that a node
whose file system is away boots and can be looked at (its slurmd does not start: step `slurm`).
"""

from __future__ import annotations

import os
import socket
from typing import Sequence

from provision import shared
from provision.errors import NodeError, PassingError
from provision.files import File, difference, write
from provision.mounts import Mount, mount_at
from provision.node import Node
from provision.step import Step

OPTIONS = "noatime,flock"
_FSTAB_OPTIONS = f"{OPTIONS},_netdev,nofail"
# In /run, which a boot empties: says which mount was written to.
_TRIED = "/run/provision/fsx"


class Fsx(Step):
    name = "fsx"
    needs = ("identify",)
    deadline = 300.0
    attempts = 8

    def needed(self, node: Node) -> bool:
        return node.live

    def missing(self, node: Node) -> Sequence[str]:
        """Raises NodeError when something else is mounted there."""
        mount = _mounted(node)
        lines = difference(node, _fstab(node)) if node.settings.provisioning == "legacy" else []
        if mount is None:
            return [*lines, f"{node.settings.fsx.source} is not mounted at {node.settings.fsx.mount_path}"]
        if difference(node, _tried(mount)):
            return [*lines, f"{node.settings.fsx.mount_path} has not been written to since it was mounted"]
        return [*lines, *(f"{path} of a run that was killed" for path in shared.leftovers(node))]

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
            raise PassingError(f"mount ended without an error and {node.settings.fsx.mount_path} is not mounted")
        for path in shared.leftovers(node):
            shared.remove(path)
        _try_out(node)
        write(node, _tried(mount))


def _mounted(node: Node) -> Mount | None:
    """The file system, if it is mounted. Raises NodeError when something else is."""
    fsx = node.settings.fsx
    if node.fsx.is_dir():
        # Where HyperPod or an administrator has it automounted, looking mounts it.
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
    """Lustre shows the address that the name had. When the name has none now, the mount name has to do."""
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
        raise NodeError(what, "move what is in it away")
    modules = node.path(f"/lib/modules/{os.uname().release}")
    if modules.is_dir() and "lustre" not in node.path("/proc/filesystems").read_text().split():
        node.run("modprobe", "lustre")
    node.run("mount", "-t", "lustre", "-o", OPTIONS, fsx.source, fsx.mount_path)


def _fstab(node: Node) -> File:
    """/etc/fstab with one line for the mount point. Raises NodeError when another kind of file system has one."""
    fsx = node.settings.fsx
    ours = f"{fsx.source} {fsx.mount_path} lustre {_FSTAB_OPTIONS} 0 0"
    path = node.path("/etc/fstab")
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        fields = line.split("#")[0].split()
        if len(fields) < 3 or fields[1] != fsx.mount_path:
            lines.append(line)
        elif fields[2] != "lustre":
            raise NodeError(f"/etc/fstab: {fields[0]} ({fields[2]}) is to be mounted at {fsx.mount_path}", "remove it")
    at = next((number for number, line in enumerate(lines) if line == ours), len(lines))
    return File("/etc/fstab", "\n".join([*lines[:at], ours, *lines[at:]]) + "\n")


def _try_out(node: Node) -> None:
    """Write, read and remove a file. Raises PassingError when that does not go well."""
    text = f"{node.identity.instance_id}\n"
    file = shared.folder(node) / f"written-by-{node.identity.instance_id}"
    try:
        shared.publish_text(node, file, text)
        if file.read_text() != text:
            raise PassingError(f"{file}: reads otherwise than it was written")
    except OSError as error:
        where = node.settings.fsx.mount_path
        raise PassingError(f"{where} cannot be written to: {error}", "look at the file system in the console") from None
    finally:
        shared.remove(file)


def _tried(mount: Mount) -> File:
    return File(_TRIED, f"{mount.identity} {mount.source}\n")
