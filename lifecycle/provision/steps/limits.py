"""Limits that EFA and the Neuron runtime need: locked memory, huge pages, reserved ports.

- EFA registers memory, so locked memory must be unlimited for logins, and for slurmd, whose limits jobs inherit.
- Huge pages: AWS's EFA software reserves 5128 of 2 MiB (EKS user guide, "Run machine learning training on Amazon EKS
  with Elastic Fabric Adapter"; libfabric's efa-check.sh). A higher number is kept.
- Ports: 48620 is the Neuron runtime's NEURON_RT_ROOT_COMM_ID, 41000 and 44000 are master ports of AWS's Neuron
  tutorials, 29500 is torchrun's, 10000 to 19999 are this kit's. The kernel then never assigns them to others.
"""

from __future__ import annotations

import re
import resource
from pathlib import Path
from typing import Sequence

from provision.files import File, difference, write
from provision.node import Node
from provision.step import Step

PORTS = "10000-19999,29500,41000,44000,48620"
HUGE_PAGES = 5128
# Read last, so that it takes precedence.
_SYSCTL = "/etc/sysctl.d/zz-hyperpod-ft.conf"
_SYSCTL_FOLDERS = ("/usr/lib/sysctl.d", "/run/sysctl.d", "/etc/sysctl.d")
_LIMITS = "/etc/security/limits.d/99-hyperpod-ft.conf"
_SLURMD = "/etc/systemd/system/slurmd.service.d/50-hyperpod-ft.conf"
_HEADER = "# Written by the step limits of hyperpod-ft's lifecycle scripts.\n"
_RESERVED = "/proc/sys/net/ipv4/ip_local_reserved_ports"
_RESERVED_PAGES = "/proc/sys/vm/nr_hugepages"


class Limits(Step):
    name = "limits"
    needs = ("identify",)

    def missing(self, node: Node) -> Sequence[str]:
        lines = [line for file in _files(node) for line in difference(node, file)]
        if node.live:
            reserved = node.path(_RESERVED).read_text()
            if merged_ports(reserved, PORTS) != merged_ports(reserved):
                lines.append(f"ports {PORTS} are not all reserved")
            if _may_raise(node):
                lines += [f"slurmd ({pid}) has limited locked memory" for pid in _limited_slurmds(node)]
        return lines

    def do(self, node: Node) -> None:
        if node.live and _has_efa(node):
            # Before the files, whose presence shows that this was attempted.
            _reserve_pages(node)
        for file in _files(node):
            write(node, file)
        if not node.live:
            return
        reserved = node.path(_RESERVED)
        reserved.write_text(merged_ports(reserved.read_text(), PORTS))
        if node.path("/run/systemd/system").is_dir():
            node.run("systemctl", "daemon-reload")
        for pid in _limited_slurmds(node):
            if not _may_raise(node):
                node.say(f"slurmd ({pid}) keeps its limit on locked memory: root has no CAP_SYS_RESOURCE here")
                continue
            # Instead of a restart: processes that slurmd starts from now on inherit it.
            resource.prlimit(pid, resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def merged_ports(*lists: str) -> str:
    """Merge comma-separated lists of ports and ranges into the kernel's form: ascending, adjacent ranges joined.

    >>> merged_ports("80,90-92", "91-95,81")
    '80-81,90-95'
    """
    ranges = []
    for item in ",".join(lists).replace("\n", "").split(","):
        if item.strip():
            first, _, last = item.strip().partition("-")
            ranges.append((int(first), int(last or first)))
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in joined)


def _files(node: Node) -> list[File]:
    """The files that take effect at boot and at login."""
    ports = merged_ports(*_configured(node, "net.ipv4.ip_local_reserved_ports"), PORTS)
    sysctl = f"net.ipv4.ip_local_reserved_ports = {ports}\n"
    if _has_efa(node):
        pages = max([HUGE_PAGES, *map(int, _configured(node, "vm.nr_hugepages"))])
        sysctl += f"vm.nr_hugepages = {pages}\n"
    who = ("* soft", "* hard", "root soft", "root hard")
    wanted = [
        File(_LIMITS, _HEADER + "".join(f"{each} memlock unlimited\n" for each in who)),
        File(_SYSCTL, _HEADER + sysctl),
    ]
    if node.identity.role != "controller":
        wanted.append(File(_SLURMD, f"{_HEADER}[Service]\nLimitMEMLOCK=infinity\n"))
    return wanted


def _configured(node: Node, key: str) -> list[str]:
    """The key's values in other files of sysctl.d(5)."""
    paths = [node.path("/etc/sysctl.conf")]
    for folder in _SYSCTL_FOLDERS:
        paths += sorted(node.path(folder).glob("*.conf"))
    pattern = re.compile(rf"^\s*-?{re.escape(key)}\s*=\s*(\S*)\s*$", re.MULTILINE)
    return [
        value
        for path in paths
        if path.is_file() and path != node.path(_SYSCTL)
        for value in pattern.findall(path.read_text(errors="replace"))
    ]


def _has_efa(node: Node) -> bool:
    # EFA devices are RDMA devices named by their driver: efa_0, or rdmap0s6 where udev renames them.
    devices = node.path("/sys/class/infiniband")
    names = [entry.name for entry in devices.iterdir()] if devices.is_dir() else []
    return any(re.match(r"efa_|rdmap", name) for name in names)


def _reserve_pages(node: Node) -> None:
    """Reserve as many pages as there is contiguous memory for: with fewer EFA is slower, which is not an error."""
    pages = node.path(_RESERVED_PAGES)
    if int(pages.read_text()) < HUGE_PAGES:
        pages.write_text(f"{HUGE_PAGES}\n")
        if int(pages.read_text()) < HUGE_PAGES:
            node.say(f"{pages.read_text().strip()} huge pages, not {HUGE_PAGES}: memory is fragmented; a reboot helps")


def _may_raise(node: Node) -> bool:
    """Whether root may raise limits, unlike in some containers (capabilities(7), CAP_SYS_RESOURCE)."""
    status = node.path("/proc/self/status").read_text()
    capabilities = int(re.findall(r"^CapEff:\s*(\S+)$", status, re.MULTILINE)[0], 16)
    return bool(capabilities >> 24 & 1)


def _limited_slurmds(node: Node) -> list[int]:
    found = []
    for process in node.path("/proc").glob("[0-9]*"):
        if _command(process) == "slurmd":
            soft, _ = resource.prlimit(int(process.name), resource.RLIMIT_MEMLOCK)
            if soft != resource.RLIM_INFINITY:
                found.append(int(process.name))
    return found


def _command(process: Path) -> str:
    try:
        return (process / "comm").read_text(errors="replace").strip()
    except OSError:
        return ""
