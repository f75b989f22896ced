"""Messages between the first host of a training job and the others: lines of JSON.

The other hosts cannot be reached by ssh; they connect to the first one:

    to the first host     {"host": 1, "job": "..."}      this host is ready
                          {"ready": true}                it has pulled what it was asked to pull
                          {"report": "node-1-1.json", "text": "..."}   a file that it left about the attempt
                          {"ended": 0}                   its script ended, with this exit status
    from the first host   {"pull": "train", "checkpoint": 40}           what the stage needs, from the store; 0: none
                          {"stage": "train", "number": 1700000000, "attempt": "/fsx/..."}
                          {"signal": 10}                 for its script
                          {"end": true}                  the job is over
"""

from __future__ import annotations

import json
import select
import socket
import time
import zlib
from contextlib import suppress
from typing import Any, Callable, Sequence

from hyperpod_ft.errors import UserError

# Above the ports of ranks and local clusters, below Linux's ephemeral ones.
_PORTS = range(31_000, 32_000)
POLL_SECONDS = 0.1
JOIN_SECONDS = 1200  # a host may still install packages
_HELLO_SECONDS = 5.0  # a host sends it at once; a port scanner never does
_MAX_HELLO_BYTES = 1024


class Peer:
    """A host at the other end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        # keep-alive: a lost instance never closes its connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
        connection.settimeout(None)
        self._connection = connection
        self._received = b""

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, **message: Any) -> None:
        """Does nothing if the host is gone: the next `receive` shows it."""
        with suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when there will be none."""
        with suppress(OSError, ValueError):
            while b"\n" not in self._received:
                more = self._connection.recv(4096)
                if not more:
                    return None
                self._received += more
            line, self._received = self._received.split(b"\n", 1)
            message = json.loads(line)
            return message if isinstance(message, dict) else None
        return None

    def hello(self) -> dict[str, Any]:
        """Its first message, or an empty one if none arrives within `_HELLO_SECONDS`."""
        deadline = time.monotonic() + _HELLO_SECONDS
        with suppress(OSError):
            while b"\n" not in self._received and len(self._received) < _MAX_HELLO_BYTES:
                self._connection.settimeout(max(0.01, deadline - time.monotonic()))
                more = self._connection.recv(_MAX_HELLO_BYTES)
                if not more or time.monotonic() > deadline:
                    break
                self._received += more
        self._connection.settimeout(None)
        return (b"\n" in self._received and self.receive()) or {}

    def poll(self, seconds: float) -> bool:
        """Whether a message or the end of the connection arrives within this time."""
        return b"\n" in self._received or bool(select.select([self], [], [], seconds)[0])

    def close(self) -> None:
        with suppress(OSError):
            self._connection.close()


def port(job: str) -> int:
    """Where the first host of a job listens: jobs on one machine, as in tests, have different ones."""
    return _PORTS[zlib.crc32(job.encode()) % len(_PORTS)]


def gather(job: str, hosts: Sequence[str], until: Callable[[], bool], seconds: float = JOIN_SECONDS) -> list[Peer]:
    """The hosts after the first one, in order, once all have joined; or those that have when `until()` becomes true.

    Raises UserError when some have not come after `seconds`.
    """
    found: dict[int, Peer] = {}
    deadline = time.monotonic() + seconds
    with socket.create_server(("", port(job)), backlog=len(hosts)) as server:
        while len(found) < len(hosts) - 1 and not until():
            if time.monotonic() > deadline:
                missing = ", ".join(name for number, name in enumerate(hosts) if number and number not in found)
                raise UserError(f"{missing}: did not join within {seconds:.0f} s", "see its log stream")
            if not select.select([server], [], [], POLL_SECONDS)[0]:
                continue
            peer = Peer(server.accept()[0])
            hello = peer.hello()
            if hello.get("job") == job and hello.get("host") in range(1, len(hosts)):
                found[hello["host"]] = peer
            else:
                peer.close()
    return [found[number] for number in sorted(found)]


def dismiss(job: str, hosts: Sequence[str], seconds: float) -> int:
    """Tell the other hosts that the job is over, also those that come within this time; returns how many have come."""
    deadline = time.monotonic() + seconds
    peers: list[Peer] = []
    with suppress(OSError):
        peers = gather(job, hosts, until=lambda: time.monotonic() > deadline)
    for peer in peers:
        peer.send(end=True)
        peer.close()
    return len(peers)
