"""Inventory of one node of a job that starts ranks: devices, network interfaces, free space and versions."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hyperpod_ft import drivers
from hyperpod_ft.config.instances import Instance
from hyperpod_ft.errors import UserError, last_line
from hyperpod_ft.job.job_host import this_host
from hyperpod_ft.launch.slurm.site import HYPERPOD

_PROGRAM_SECONDS = 30
# EC2 (Nitro) gives an instance's type as the model of the machine; aws-ofi-nccl reads it there, too.
_MODEL = Path("/sys/devices/virtual/dmi/id/product_name")
_VENDOR = _MODEL.with_name("sys_vendor")  # `Amazon EC2` there
# Directories of AWS's images that may not be on PATH.
_PROGRAM_DIRECTORIES = ("/opt/amazon/efa/bin",)


@dataclass(frozen=True)
class NodeReport:
    """The inventory of one node. A count is None when it was not looked up, or its program is missing."""

    node: str
    devices: int | None = None  # accelerators that the driver's own program lists
    device_cores: tuple[int, ...] = ()  # NeuronCores of each, physical or logical
    device_files: int | None = None  # /dev/neuron*
    efa: int | None = None
    volume_gib: float | None = None  # free on the shared volume
    temporary_gib: float | None = None  # free in /tmp
    versions: Mapping[str, str] | None = None  # of the driver and of every package of the interpreter
    faults: tuple[str, ...] = ()  # errors of the programs, with remedies
    instance_type: str = ""  # without `ml.`; empty where it is not known
    doubts: tuple[str, ...] = ()  # what the kit does not understand, and what may be wrong


def observe(instance: Instance, nodes: int, volume: Path) -> NodeReport:
    """Look at this node: without accelerators only at versions; at EFA and packages only among several nodes."""
    versions = _package_versions() if nodes > 1 else {}
    if not instance.has_accelerators:
        return NodeReport(this_host().name, versions=versions)
    devices: int | None = None
    device_cores: tuple[int, ...] = ()
    device_files: int | None = None
    faults: list[str] = []
    doubts: list[str] = []
    if instance.is_neuron:
        try:
            program = neuron_ls()
            listing = None if program is None else neuron_devices(program)
            if program and listing is None:
                doubts.append(f"{program} {UNKNOWN_FORMAT}")
        except UserError as error:
            listing = None
            faults.append(str(error))
        if listing is not None:
            devices = len(listing)
            counts = [entry.get("nc_count") for entry in listing]
            device_cores = tuple(count for count in counts if isinstance(count, int))
        device_files = sum(bool(re.fullmatch(r"neuron\d+", path.name)) for path in Path("/dev").iterdir())
        versions["neuron driver"] = drivers.neuron() or (_output("modinfo", "-F", "version", "neuron") or "").strip()
    else:
        listed = (_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "").split()
        devices = len(listed)
        versions["nvidia driver"] = listed[0] if listed else ""
    return NodeReport(
        node=this_host().name,
        devices=devices,
        device_cores=device_cores,
        device_files=device_files,
        efa=_efa_interfaces(_output("fi_info", "-p", "efa"), elsewhere=_outside_aws()) if nodes > 1 else None,
        faults=tuple(faults),
        doubts=tuple(doubts),
        instance_type=_instance_type(),
        volume_gib=shutil.disk_usage(volume).free / 2**30,
        temporary_gib=shutil.disk_usage(tempfile.gettempdir()).free / 2**30,
        versions=versions,
    )


def _instance_type() -> str:
    return _MODEL.read_text(encoding="utf-8").strip() if HYPERPOD.is_dir() and _MODEL.is_file() else ""


def _outside_aws() -> bool:
    """Whether the machine says that another vendor made it."""
    return _VENDOR.is_file() and "Amazon" not in _VENDOR.read_text(encoding="utf-8")


def _output(*command: str) -> str | None:
    """A program's output; empty when it fails or hangs, as on a broken node; None when it is not installed."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *_PROGRAM_DIRECTORIES])
    program = shutil.which(command[0], path=path)
    if program is None:
        return None
    try:
        return subprocess.run(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=_PROGRAM_SECONDS,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _efa_interfaces(text: str | None, *, elsewhere: bool) -> int | None:
    """Interfaces in the output of `fi_info -p efa`, which lists each once for every endpoint type it offers.

    `elsewhere`: not on AWS, where libfabric is installed for other networks and a node without EFA is a good one.
    """
    if text is None:
        return None
    domains = re.findall(r"^\s*domain:\s*(\S+)", text, re.MULTILINE)
    found = len({re.sub(r"-(rdm|dgrm|direct)$", "", domain) for domain in domains})
    return None if elsewhere and not found else found


def _package_versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for distribution in metadata.distributions():
        found.setdefault(distribution.name, distribution.version)  # the first on the path, as for an import
    return found


_NEURON_TOOLS = "/opt/aws/neuron/bin"
# The second replaces the first in Neuron 2.34 (AWS's announcement of October 2026).
_JSON_OPTIONS = (("--json-output",), ("--output-format", "json"))
UNKNOWN_FORMAT = "answers in a format that the kit does not know; the health check counts devices in /dev"
_NEURON_SECONDS = 120


def neuron_ls() -> Path | None:
    """The path of the program, which is part of AWS's images; None elsewhere."""
    found = shutil.which("neuron-ls") or shutil.which("neuron-ls", path=_NEURON_TOOLS)
    return Path(found) if found else None


def neuron_devices(program: Path, device_files: Path = Path("/dev")) -> list[dict[str, Any]] | None:
    """The node's Neuron devices, without the processes that use them; empty on a node without device files.

    None when `neuron-ls` answers, but not as expected. Raises UserError when it cannot read the devices: the driver is
    missing, or its version does not match.
    """
    messages: list[str] = []
    answers = False
    for options in (*_JSON_OPTIONS, ()):  # without options: for people, which shows that the driver answers
        try:
            done = subprocess.run(
                [str(program), *options], capture_output=True, text=True, check=False, timeout=_NEURON_SECONDS
            )
            if done.returncode == 0:
                answers = True
                return _described(json.loads(done.stdout))
            messages.append(last_line(done.stderr + done.stdout) or f"exit status {done.returncode}")
        except (ValueError, AttributeError, TypeError, KeyError):
            continue
        except subprocess.TimeoutExpired:
            messages.append(f"did not finish within {_NEURON_SECONDS} s")
            break
    if not any(device_files.glob("neuron[0-9]*")):
        return []
    if answers:
        return None
    raise UserError(
        f"{program}: {', then '.join(dict.fromkeys(messages))}",
        "the node's Neuron driver is not running or does not match its tools: have the cluster's image updated or the"
        " node replaced; the kit does not change drivers",
    )


def _described(listing: Any) -> list[dict[str, Any]]:
    """Raises one of the errors above for a listing in another format."""
    if isinstance(listing, dict):  # the newer format has the list in an object
        (listing,) = (value for value in listing.values() if isinstance(value, list))
    for entry in listing:
        entry["neuron_device"]
    return [{key: value for key, value in entry.items() if key != "neuron_processes"} for entry in listing]
