"""Install packages, after waiting for other package managers on this node.

At boot, unattended-upgrades and cloud-init hold their locks for minutes.
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
# struct flock of 64-bit Linux: type, whence, start, length, pid. Python does not define it.
_FLOCK = "hhqqi4x"


def install(node: Node, packages: Sequence[str]) -> None:
    """Install packages from the node's sources. Raises PassingError on failure."""
    wait_for_others(node)
    # Finish what a killed dpkg left incomplete, for example in an earlier run of these scripts.
    node.run("dpkg", "--configure", "-a")
    # A single missing source, or one signed with an old key, fails the update; the packages may not need it.
    node.run("apt-get", "update", "-qq", check=False)
    wait_for_others(node)
    node.run("apt-get", "install", "-qq", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=120", *packages)


def wait_for_others(node: Node, seconds: float = _SECONDS) -> None:
    """Wait until no process holds a lock of apt or dpkg. Raises PassingError after `seconds`."""
    end = time.monotonic() + seconds
    reported = False
    while True:
        held = [(path, holder) for path in LOCKS if (holder := _holder(node.path(path)))]
        if not held:
            return
        path, holder = held[0]
        if not reported:
            node.say(f"process {holder} holds {path}; waiting")
            reported = True
        if time.monotonic() >= end:
            raise PassingError(f"{path}: process {holder} has held it for {seconds:.0f} s", "wait until it ends")
        time.sleep(1)


def _holder(path: Path) -> int:
    """The process that holds a POSIX lock on the file; 0 if none does."""
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
