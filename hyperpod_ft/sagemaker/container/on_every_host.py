"""Start a program on every host of a training job, and pass signals on to it: what srun does in a Slurm job.

    python -m hyperpod_ft.sagemaker.container.on_every_host STAGE RUN_DIR COMMAND...     on the first host

The first host waits until all others have connected to it, tells them which stage's script to run (messages.py), and
waits for their exit statuses (`run_everywhere`). Every other host serves it (`serve_first_host`). With a store, hosts
share no volume: what they report about an attempt are messages too, and before an attempt each pulls the checkpoint
from the store that the first host has found to be the newest complete one, with the files of all hosts.
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
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

from hyperpod_ft.errors import UserError, print_error
from hyperpod_ft.runs.job_files import ATTEMPT_DIRECTORY, ATTEMPT_NUMBER, HOSTS, JOB_ID, NOTICE, shell_status
from hyperpod_ft.sagemaker.container.messages import POLL_SECONDS, Peer, gather, port

STORE = "HYPERPOD_FT_STORE"  # set when the run is in a store
_BEFORE = (sys.executable, "-m", "hyperpod_ft.sagemaker.container_commands", "before-attempt")

# How long others may run after one host has ended: as with `srun --wait=60` in ranks.sbatch.j2. After a failure, srun
# ends them at once (`--kill-on-bad-exit=1`); we allow ten seconds for their own reports.
_GRACE_SECONDS, _GRACE_SECONDS_AFTER_A_FAILURE = 60, 10
# Between SIGTERM and SIGKILL.
_TERMINATION_SECONDS = 15


def run_everywhere(stage: str, run_directory: str, command: Sequence[str]) -> int:
    """Run the command here and the stage's script on the other hosts; returns the highest exit status."""
    arrived: list[int] = []
    for number in (NOTICE, signal.SIGTERM):
        signal.signal(number, lambda received, _: arrived.append(received))
    hosts, job = os.environ[HOSTS].split(), os.environ[JOB_ID]
    peers = gather(job, hosts, until=lambda: bool(arrived))
    if arrived:
        return 128 + arrived[0]
    if STORE in os.environ and peers and (status := _pull_everywhere(stage, run_directory, peers, arrived)):
        return status
    # higher than in earlier attempts, after a spot interruption too
    attempt = int(time.time())
    for peer in peers:
        peer.send(stage=stage, number=attempt, attempt=os.environ.get(ATTEMPT_DIRECTORY, ""))
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**os.environ, ATTEMPT_NUMBER: str(attempt)})
    statuses = _wait_for_all(child, peers, arrived, Path(os.environ.get(ATTEMPT_DIRECTORY, ".")))
    for host, status in zip(hosts, statuses):
        if status:
            print(f"{host} ended with exit status {status}", file=sys.stderr, flush=True)
    return max(statuses)


def _pull_everywhere(stage: str, run_directory: str, peers: Sequence[Peer], arrived: list[int]) -> int:
    """Pull what the stage needs from the store to this host, then to all others at once; returns an exit status."""
    done = subprocess.run([*_BEFORE, run_directory, stage], stdout=subprocess.PIPE, text=True, check=False)
    *printed, outcome = done.stdout.splitlines() or [""]
    print("".join(f"{line}\n" for line in printed), end="", flush=True)
    if done.returncode:
        return 1  # a crash, which is retried, even for a user's error: earlier pulls of this job went well
    for peer in peers:
        peer.send(pull=stage, checkpoint=json.loads(outcome)["checkpoint"] or 0)
    waiting = list(peers)
    while waiting:
        if arrived:
            return 128 + arrived[0]
        for peer in select.select(waiting, [], [], POLL_SECONDS)[0]:
            if peer.receive() is None:  # it is gone, or cannot pull: a crash, as above
                return 1
            waiting.remove(peer)
    return 0


def _wait_for_all(
    child: subprocess.Popen[bytes], peers: Sequence[Peer], arrived: list[int], directory: Path
) -> list[int]:
    """The exit statuses of all hosts, in order, once the command has ended on each. Passes on signals that arrive."""
    statuses: list[int | None] = [None] * (1 + len(peers))

    def send_signal(number: int) -> None:
        if child.poll() is None:
            child.send_signal(number)
        for place, peer in enumerate(peers, 1):
            if statuses[place] is None:
                peer.send(signal=number)

    ending = iter((signal.SIGTERM, signal.SIGKILL))  # for hosts that outlive the others
    deadline = None
    while None in statuses:
        while arrived:
            send_signal(arrived.pop(0))
        waiting = [peer for place, peer in enumerate(peers, 1) if statuses[place] is None]
        for peer in select.select(waiting, [], [], POLL_SECONDS)[0]:
            while (message := peer.receive()) and "report" in message:
                _write_report(directory / Path(message["report"]).name, message["text"])
                if not peer.poll(0):
                    break
            if message is None or "ended" in message:  # a host without a connection is gone
                statuses[1 + peers.index(peer)] = int(message["ended"]) if message else 1
        if statuses[0] is None and child.poll() is not None:
            statuses[0] = shell_status(child.returncode)
        known = [status for status in statuses if status is not None]
        now = time.monotonic()
        if known and deadline is None:
            deadline = now + _GRACE_SECONDS
        if any(known) and deadline is not None:
            deadline = min(deadline, now + _GRACE_SECONDS_AFTER_A_FAILURE)
        if deadline is not None and now > deadline and (number := next(ending, None)):
            send_signal(number)
            deadline = now + _TERMINATION_SECONDS
    for peer in peers:
        peer.close()
    return [status or 0 for status in statuses]


def serve_first_host(
    job: str,
    first: str,
    number: int,
    pull: Callable[[str, int], None],
    start: Callable[[str, Mapping[str, str]], subprocess.Popen[bytes]],
    expired: Callable[[], bool],
) -> int:
    """Serve the first host until it says that the job is over; returns 0, since its exit status is the job's.

    `pull` pulls what a stage needs, and the checkpoint of a step (0 for none); after a UserError the attempt does not
    start, and the host waits for the next one. `start` starts the script of a stage with these variables, in its own
    process group. Gives up with status 1 when `expired()` is true.
    """
    while not expired():
        try:
            peer = Peer(socket.create_connection((first, port(job)), timeout=5))
        except OSError:
            time.sleep(0.2)  # it is between two attempts, or not there yet
            continue
        try:
            peer.send(host=number, job=job)
            while (message := _next(peer, expired)) and "pull" in message:
                pull(str(message["pull"]), int(message["checkpoint"]))
                peer.send(ready=True)
            if message and "end" in message:
                return 0
            if message:
                variables = {ATTEMPT_NUMBER: str(message["number"]), ATTEMPT_DIRECTORY: str(message["attempt"])}
                process = start(str(message["stage"]), variables)
                try:
                    _relay(peer, process, Path(message["attempt"]), int(message["number"]))
                finally:
                    with suppress(OSError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        except UserError as error:
            print(f"the attempt does not start: {error}", file=sys.stderr, flush=True)
        finally:
            peer.close()
    return 1


def _next(peer: Peer, expired: Callable[[], bool]) -> dict[str, Any] | None:
    """The next message, however long it takes; None when the first host is gone or `expired()` is true."""
    while not expired():
        if peer.poll(POLL_SECONDS):
            return peer.receive()
    return None


def _relay(peer: Peer, process: subprocess.Popen[bytes], directory: Path, number: int) -> None:
    """Pass on the signals of the first host until the process has ended and the first host knows, or is gone.

    What the process leaves in the attempt's directory is sent to it.
    """
    reported = False
    sent: set[Path] = set()
    while True:
        ended = process.poll() is not None
        for report in set(directory.glob(f"*-{number}-*.json")) - sent:
            if not report.name.startswith("."):  # not whole yet
                sent.add(report)
                peer.send(report=report.name, text=report.read_text(encoding="utf-8"))
        if ended and not reported:
            peer.send(ended=shell_status(process.returncode))
            reported = True
        if not peer.poll(POLL_SECONDS):
            continue
        message = peer.receive()
        if message is None:
            return
        if not reported:
            process.send_signal(int(message["signal"]))


def _write_report(path: Path, text: str) -> None:
    """Write another host's report, unless it is on a shared volume already."""
    if not path.exists():
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)


if __name__ == "__main__":
    try:
        sys.exit(run_everywhere(sys.argv[1], sys.argv[2], sys.argv[3:]))
    except UserError as error:
        print_error(sys.argv[1], str(error))
        sys.exit(1)  # a crash, which is retried: the hosts may come next time
