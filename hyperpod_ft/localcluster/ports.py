"""Reserve a block of TCP ports that no other local cluster uses, without a lock file.

The lock is an abstract Unix socket: the kernel lets one process bind its name, frees it when the last holder dies,
in any way, and scopes it to the network namespace, like the ports themselves.
"""

import socket
from contextlib import suppress
from dataclasses import dataclass

from hyperpod_ft.errors import UserError

# Below the ephemeral range (32768 and up) and clear of 10000-19999, where the ranks of jobs meet (job/node.py).
PORTS = range(20_000, 24_000)
BLOCK = 128


@dataclass(frozen=True)
class PortBlock:
    """`BLOCK` consecutive ports from `first`; `index` counts blocks; `lock` holds them while any copy is open."""

    first: int
    index: int
    lock: socket.socket


def reserve_ports(count: int) -> PortBlock:
    """Lock the lowest block of which the first `count` ports are free. Raises UserError if there is none."""
    if count > BLOCK:
        raise ValueError(f"{count} ports do not fit a block of {BLOCK}")
    for index, first in enumerate(PORTS[::BLOCK]):
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            lock.bind(f"\0hyperpod-ft-ports-{first}")
        except OSError:
            lock.close()
            continue
        if all(_is_free(port) for port in range(first, first + count)):
            return PortBlock(first, index, lock)
        lock.close()
    raise UserError(
        f"no {count} consecutive free TCP ports between {PORTS[0]} and {PORTS[-1]}",
        "stop a local cluster with `hyperpod-ft local down`",
    )


def is_listening(port: int) -> bool:
    """Whether a process on this machine accepts connections on `port`."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Like Slurm: an earlier cluster's connections in TIME_WAIT do not block its ports.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))  # noqa: S104 - only a probe, closed at once
        except OSError:
            return False
        return True
