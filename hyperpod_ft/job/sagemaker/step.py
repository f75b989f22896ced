"""Start a program on every host of a training job, and pass signals on to it: what srun does in a Slurm job.

    python -m hyperpod_ft.job.sagemaker.step STAGE RUN_DIR COMMAND...     on the first host

The other hosts cannot be reached by ssh; they come to the first one (`follow`), which tells them which stage's script
to run. With a store, hosts share no volume: what they report about an attempt are messages too, and each gets the parts
of a checkpoint that others wrote from the store. Messages are lines of JSON:

    to the first host     {"host": 1, "job": "..."}      this host is ready
                          {"report": "node-1-1.json", "text": "..."}   a file that it left about the attempt
                          {"ended": 0}                   its script ended, with this exit status
    from the first host   {"stage": "train", "number": 1700000000, "attempt": "/fsx/..."}
                          {"signal": 10}                 for its script
                          {"end": true}                  the job is over
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

from hyperpod_ft.job.job_step import ATTEMPT_DIRECTORY, ATTEMPT_NUMBER, HOSTS
from hyperpod_ft.job.sagemaker.place import JobError

JOB = "HYPERPOD_FT_JOB_ID"
STORE = "HYPERPOD_FT_STORE"  # set when the run is in a store
NOTICE = signal.SIGUSR1  # save a checkpoint and end

# Above the ports of ranks and local clusters, below Linux's ephemeral ones.
_PORTS = range(31_000, 32_000)
_POLL_SECONDS = 0.1
JOIN_SECONDS = 1200  # a host may still install packages
# How long others may run after the first one has ended, well or not; then between SIGTERM and SIGKILL.
_GRACE_SECONDS, _GRACE_SECONDS_AFTER_A_FAILURE = 60, 10
_TERMINATION_SECONDS = 15


class Peer:
    """A host at the other end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        # an instance that is gone sends nothing more, not even that it is
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

    def says_something(self, seconds: float) -> bool:
        """Whether a message or the end of the connection arrives within this time."""
        return b"\n" in self._received or bool(select.select([self], [], [], seconds)[0])

    def close(self) -> None:
        with suppress(OSError):
            self._connection.close()


def port(job: str) -> int:
    """Where the first host of a job listens: jobs on one machine, as in tests, have different ones."""
    return _PORTS[zlib.crc32(job.encode()) % len(_PORTS)]


def gather(job: str, hosts: Sequence[str], until: Callable[[], bool], seconds: float = JOIN_SECONDS) -> list[Peer]:
    """The hosts after the first one, in order, when all have come; those that have when `until` says so.

    Raises JobError when some have not come after `seconds`.
    """
    found: dict[int, Peer] = {}
    deadline = time.monotonic() + seconds
    with socket.create_server(("", port(job)), backlog=len(hosts)) as server:
        while len(found) < len(hosts) - 1 and not until():
            if time.monotonic() > deadline:
                missing = ", ".join(name for number, name in enumerate(hosts) if number and number not in found)
                raise JobError(f"{missing}: did not join within {seconds:.0f} s; see its log stream")
            if not select.select([server], [], [], _POLL_SECONDS)[0]:
                continue
            peer = Peer(server.accept()[0])
            hello = (peer.says_something(5) and peer.receive()) or {}
            if hello.get("job") == job and hello.get("host") in range(1, len(hosts)):
                found[hello["host"]] = peer
            else:
                peer.close()
    return [found[number] for number in sorted(found)]


def lead(stage: str, run_directory: str, command: Sequence[str]) -> int:
    """Run the command here and the stage's script on the other hosts; returns the highest exit status."""
    arrived: list[int] = []
    for number in (NOTICE, signal.SIGTERM):
        signal.signal(number, lambda received, _: arrived.append(received))
    hosts, job = os.environ[HOSTS].split(), os.environ[JOB]
    peers = gather(job, hosts, until=lambda: bool(arrived))
    if arrived:
        return 128 + arrived[0]
    if STORE in os.environ and peers:
        around = [sys.executable, "-m", "hyperpod_ft.job.sagemaker.around", "before", run_directory, stage]
        if status := subprocess.run(around, check=False).returncode:
            return _as_a_shell(status)
    # higher than in earlier attempts, after a spot interruption too
    attempt = int(time.time())
    for peer in peers:
        peer.send(stage=stage, number=attempt, attempt=os.environ.get(ATTEMPT_DIRECTORY, ""))
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**os.environ, ATTEMPT_NUMBER: str(attempt)})
    statuses = _accompany(child, peers, arrived, Path(os.environ.get(ATTEMPT_DIRECTORY, ".")))
    for host, status in zip(hosts, statuses):
        if status:
            print(f"step: {host} ended with exit status {status}", file=sys.stderr, flush=True)
    return max(statuses)


def _accompany(child: subprocess.Popen[bytes], peers: Sequence[Peer], arrived: list[int], directory: Path) -> list[int]:
    """Wait for the end of the step on all hosts, pass on the signals that arrive; the exit statuses by host."""
    statuses: list[int | None] = [None] * (1 + len(peers))

    def tell(number: int) -> None:
        if child.poll() is None:
            child.send_signal(number)
        for place, peer in enumerate(peers, 1):
            if statuses[place] is None:
                peer.send(signal=number)

    ending = iter((signal.SIGTERM, signal.SIGKILL))  # for hosts that outlive the others
    deadline = None
    while None in statuses:
        while arrived:
            tell(arrived.pop(0))
        waiting = [peer for place, peer in enumerate(peers, 1) if statuses[place] is None]
        for peer in select.select(waiting, [], [], _POLL_SECONDS)[0]:
            while (message := peer.receive()) and "report" in message:
                _keep(directory / Path(message["report"]).name, message["text"])
                if not peer.says_something(0):
                    break
            if message is None or "ended" in message:  # a host without a connection is gone
                statuses[1 + peers.index(peer)] = int(message["ended"]) if message else 1
        if statuses[0] is None and child.poll() is not None:
            statuses[0] = _as_a_shell(child.returncode)
        known = [status for status in statuses if status is not None]
        now = time.monotonic()
        if known and deadline is None:
            deadline = now + _GRACE_SECONDS
        if any(known) and deadline is not None:
            deadline = min(deadline, now + _GRACE_SECONDS_AFTER_A_FAILURE)
        if deadline is not None and now > deadline and (number := next(ending, None)):
            tell(number)
            deadline = now + _TERMINATION_SECONDS
    for peer in peers:
        peer.close()
    return [status or 0 for status in statuses]


def dismiss(job: str, hosts: Sequence[str], seconds: float) -> None:
    """Tell the other hosts that the job is over, also those that come within this time."""
    deadline = time.monotonic() + seconds
    with suppress(OSError):
        for peer in gather(job, hosts, until=lambda: time.monotonic() > deadline):
            peer.send(end=True)
            peer.close()


def follow(
    job: str,
    leader: str,
    number: int,
    start: Callable[[str, Mapping[str, str]], subprocess.Popen[bytes]],
    expired: Callable[[], bool],
) -> int:
    """Serve the first host until it says that the job is over; returns 0, since its exit status is the job's.

    `start` starts the script of a stage with these variables, in a process group of its own. Gives up when `expired`
    says so, with status 1.
    """
    while not expired():
        try:
            peer = Peer(socket.create_connection((leader, port(job)), timeout=5))
        except OSError:
            time.sleep(0.2)  # it is between two attempts, or not there yet
            continue
        peer.send(host=number, job=job)
        while not peer.says_something(_POLL_SECONDS) and not expired():
            pass
        message = None if expired() else peer.receive()
        if message and "end" in message:
            return 0
        if message:
            variables = {ATTEMPT_NUMBER: str(message["number"]), ATTEMPT_DIRECTORY: str(message["attempt"])}
            process = start(str(message["stage"]), variables)
            try:
                _obey(peer, process, Path(message["attempt"]), int(message["number"]))
            finally:
                with suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        peer.close()
    return 1


def _obey(peer: Peer, process: subprocess.Popen[bytes], directory: Path, number: int) -> None:
    """Pass on the signals of the first host until the process has ended and the first host knows, or is gone.

    What the process leaves in the attempt's directory is sent to it.
    """
    told = False
    sent: set[Path] = set()
    while True:
        ended = process.poll() is not None
        for report in set(directory.glob(f"*-{number}-*.json")) - sent:
            if not report.name.startswith("."):  # not whole yet
                sent.add(report)
                peer.send(report=report.name, text=report.read_text(encoding="utf-8"))
        if ended and not told:
            peer.send(ended=_as_a_shell(process.returncode))
            told = True
        if not peer.says_something(_POLL_SECONDS):
            continue
        message = peer.receive()
        if message is None:
            return
        if not told:
            process.send_signal(int(message["signal"]))


def _keep(path: Path, text: str) -> None:
    """Write another host's report, unless the hosts share a volume, and it is there."""
    if not path.exists():
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)


def _as_a_shell(status: int) -> int:
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    try:
        sys.exit(lead(sys.argv[1], sys.argv[2], sys.argv[3:]))
    except JobError as error:
        print(f"error: {sys.argv[1]}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
