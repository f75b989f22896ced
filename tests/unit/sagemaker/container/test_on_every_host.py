"""What starts a program on every host of a training job; the hosts are threads and processes of this machine."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.job_files import ATTEMPT_DIRECTORY, ATTEMPT_NUMBER, HOST_NUMBER, HOSTS
from hyperpod_ft.sagemaker.container import messages
from hyperpod_ft.sagemaker.container.on_every_host import STORE, serve_first_host
from tests.waiting import wait_for

REPOSITORY = Path(__file__).resolve().parents[4]
FIRST = "localhost"


@pytest.fixture
def job(tmp_path: Path) -> str:
    return f"job-{tmp_path.name}-{os.getpid()}"


class Follower:
    """A host in a thread of this process; its script is a line of bash."""

    def __init__(self, job: str, number: int, script: str) -> None:
        self.pulled: list[tuple[str, int]] = []
        self.cannot_pull = False
        self.started: list[tuple[str, Mapping[str, str]]] = []
        self.script = script
        self.process: subprocess.Popen[bytes] | None = None
        self.status: int | None = None
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._follow, args=(job, number))
        self.thread.start()

    def _follow(self, job: str, number: int) -> None:
        self.status = serve_first_host(job, FIRST, number, self._pull, self._start, self.over.is_set)

    def _pull(self, stage: str, checkpoint: int) -> None:
        if self.cannot_pull:
            raise UserError("store s3://b/ft: access denied")
        self.pulled.append((stage, checkpoint))

    def _start(self, stage: str, variables: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        self.started.append((stage, variables))
        self.process = subprocess.Popen(["bash", "-c", self.script], start_new_session=True)
        return self.process


@contextmanager
def followers(job: str, *scripts: str) -> Iterator[list[Follower]]:
    found = [Follower(job, number, script) for number, script in enumerate(scripts, 1)]
    try:
        yield found
    finally:
        for follower in found:
            follower.over.set()
            follower.thread.join()


# PATIENCE: seconds that it waits for hosts that outlive the others.
PROGRAM = r"""
import os, sys
from hyperpod_ft.sagemaker.container import on_every_host
seconds = float(os.environ.get("PATIENCE", "40"))
on_every_host._GRACE_SECONDS = on_every_host._GRACE_SECONDS_AFTER_A_FAILURE = seconds
on_every_host._TERMINATION_SECONDS = seconds
script = '${SAY:-echo pulling}; echo "{\\"checkpoint\\": ${CHECKPOINT}}"; exit "${STATUS:-0}"'
on_every_host._BEFORE = ("bash", "-c", script)
sys.exit(on_every_host.run_everywhere("train", "/fsx/run", sys.argv[1:]))
"""


def lead(
    job: str, hosts: int, command: str, attempt: str = "/fsx/attempt", directory: Path | None = None, **variables: str
) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "bash", "-c", command],
        cwd=directory,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "HYPERPOD_FT_JOB_ID": job,
            HOSTS: " ".join([FIRST, *(f"algo-{number}" for number in range(2, hosts + 1))]),
            HOST_NUMBER: "0",
            ATTEMPT_DIRECTORY: attempt,
            **variables,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> tuple[int, str]:
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def test_nothing_starts_when_a_host_cannot_pull_what_it_needs(job: str) -> None:
    """Status 1 is a crash to the supervisor, which tries again; 2, a user's error, would end the training."""
    store = {STORE: "s3://b/ft", "CHECKPOINT": "40"}
    with followers(job, "exit 0", "exit 0") as hosts:
        assert finish(lead(job, 3, "echo started", **store, STATUS="2")) == (1, "pulling\n")
        hosts[1].cannot_pull = True
        assert finish(lead(job, 3, "echo started", **store)) == (1, "pulling\n")
        assert not any(host.started for host in hosts)
        hosts[1].cannot_pull = False
        assert finish(lead(job, 3, "echo started", **store)) == (0, "pulling\nstarted\n"), (
            "it waits for the next attempt"
        )


def test_a_failure_anywhere_ends_the_others(job: str) -> None:
    with followers(job, "exit 3", "sleep 600"):
        status, output = finish(lead(job, 3, "trap '' TERM; while :; do sleep 0.1; done", PATIENCE="1"))
    assert status in {143, 137}
    assert "algo-2 ended with exit status 3" in output


def test_the_highest_exit_status_counts(job: str) -> None:
    with followers(job, "exit 5", "exit 0"):
        assert finish(lead(job, 3, "exit 4"))[0] == 5


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_signals_reach_every_host(job: str, number: signal.Signals, tmp_path: Path) -> None:
    name = number.name.removeprefix("SIG")
    scripts = [
        f"trap 'touch {tmp_path}/{host}.got; exit 0' {name}; touch {tmp_path}/{host}; while :; do sleep 0.05; done"
        for host in range(2)
    ]
    with followers(job, scripts[1]):
        process = lead(job, 2, scripts[0])
        wait_for(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
        process.send_signal(number)
        assert finish(process)[0] == 0
    assert (tmp_path / "0.got").exists() and (tmp_path / "1.got").exists()


def test_a_host_without_the_first_one_ends_what_it_runs_and_comes_back(job: str) -> None:
    with followers(job, "trap '' TERM; while :; do sleep 0.1; done") as hosts:
        process = lead(job, 2, "sleep 600")
        wait_for(lambda: hosts[0].process is not None)
        process.kill()
        running = hosts[0].process
        assert running is not None and running.wait(300) == -signal.SIGKILL
        hosts[0].script = "exit 0"
        assert finish(lead(job, 2, "exit 0"))[0] == 0
        process.wait()


def test_a_host_that_is_gone_is_a_failure(job: str) -> None:
    process = lead(job, 2, "sleep 600", PATIENCE="1")
    connection = connected(job)
    messages.Peer(connection).send(host=1, job=job)
    assert messages.Peer(connection).receive() is not None
    connection.close()
    status, output = finish(process)
    assert "algo-2 ended with exit status 1" in output and status in {143, 137}


def test_others_are_not_taken_for_hosts(job: str) -> None:
    process = lead(job, 2, "exit 0")
    stranger, liar = messages.Peer(connected(job)), messages.Peer(connected(job))
    stranger.send(host=1, job="another")
    liar.send(host=2, job=job)
    assert stranger.receive() is None and liar.receive() is None
    with followers(job, "exit 0"):
        assert finish(process)[0] == 0


def test_a_stranger_that_says_half_a_line_is_not_waited_for(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_HELLO_SECONDS", 2.0)
    with ThreadPoolExecutor() as pool:
        gathered = pool.submit(messages.gather, job, [FIRST, "algo-2"], until=lambda: False)
        over = threading.Event()
        with connected(job) as stranger, connected(job) as slow, connected(job) as host:
            stranger.sendall(b'{"host"')
            drips = pool.submit(drip, slow, over)
            messages.Peer(host).send(host=1, job=job)
            assert len(gathered.result(300)) == 1
            over.set()
            drips.result(300)


def drip(connection: socket.socket, over: threading.Event) -> None:
    """Send a byte now and then, and never a whole line."""
    with suppress(OSError):
        while not over.wait(0.1):
            connection.sendall(b".")


def connected(job: str) -> socket.socket:
    def connection() -> socket.socket | None:
        with suppress(OSError):
            return socket.create_connection((FIRST, messages.port(job)))
        return None

    return wait_for(connection)


def test_a_host_that_never_comes_is_named(job: str) -> None:
    with pytest.raises(UserError, match=r"algo-2, algo-3: .*0 s"):
        messages.gather(job, [FIRST, "algo-2", "algo-3"], until=lambda: False, seconds=0)


def test_reports_of_hosts_without_the_same_volume_reach_the_first_one(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two working directories stand for the volumes; the attempt's directory has one name in both."""
    here, there = tmp_path / "here", tmp_path / "there"
    for volume in (here, there):
        (volume / "attempt").mkdir(parents=True)
    (there / "attempt" / "node-1-1.json").write_text("of an earlier attempt")
    monkeypatch.chdir(there)
    report = 'echo mine >"attempt/failure-$(cat number)-algo-2.json"; exit 3'
    tell = f"echo ${ATTEMPT_NUMBER} >{tmp_path}/n; mv {tmp_path}/n {there}/number"
    with followers(job, f"until [[ -e number ]]; do sleep 0.02; done; {report}"):
        status, _ = finish(lead(job, 2, tell, attempt="attempt", directory=here))
    assert status == 3
    number = (there / "number").read_text().strip()
    found = {path.name: path.read_text() for path in (here / "attempt").iterdir()}
    assert found == {f"failure-{number}-algo-2.json": "mine\n"}
