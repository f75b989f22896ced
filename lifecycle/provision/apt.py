"""Packages, for the steps that install any: waits for whoever else manages packages on this node.

At boot, unattended-upgrades and cloud-init hold these locks for minutes.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from pathlib import Path
from typing import Sequence

from provision.errors import PassingError
from provision.node import Node

LOCKS = ("/var/lib/dpkg/lock-frontend", "/var/lib/dpkg/lock", "/var/lib/apt/lists/lock", "/var/cache/apt/archives/lock")
_SECONDS = 300.0
# struct flock of 64-bit Linux: type, whence, start, length, process. Python gives no name to it.
_FLOCK = "hhqqi4x"


def install(node: Node, packages: Sequence[str]) -> None:
    """Install packages at the versions that the node's sources have. Raises PassingError when that does not succeed."""
    wait_for_others(node)
    # What a killed dpkg left half done, for example by a run of these scripts.
    node.run("dpkg", "--configure", "-a")
    # One source of many that is gone or signed with an old key fails all; what is wanted may be had without it.
    node.run("apt-get", "update", "-qq", check=False)
    wait_for_others(node)
    node.run("apt-get", "install", "-qq", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=120", *packages)


def wait_for_others(node: Node, seconds: float = _SECONDS) -> None:
    """Wait until nobody holds a lock of apt or dpkg. Raises PassingError after `seconds`."""
    end = time.monotonic() + seconds
    said = False
    while True:
        held = [(path, holder) for path in LOCKS if (holder := _holder(node.path(path)))]
        if not held:
            return
        path, holder = held[0]
        if not said:
            node.say(f"process {holder} holds {path}; waiting")
            said = True
        if time.monotonic() >= end:
            raise PassingError(f"{path}: process {holder} holds it for {seconds:.0f} s", "wait until it ends")
        time.sleep(1)


def _holder(path: Path) -> int:
    """The process that holds a POSIX lock of the file; 0 when nobody does."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, holder = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
        return 0 if kind == fcntl.F_UNLCK else int(holder) or -1
    finally:
        os.close(descriptor)
