"""Launcher `process`: the same rendered scripts as plain processes, in dependency order, without Slurm.

A chain runner, a process detached from the terminal, runs the scripts of one submission one after the other. It keeps
their states in one file, and holds a lock while it runs, so that others can see that it does.
"""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from pydantic import TypeAdapter

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.protocol import JobState
from hyperpod_ft.planning.plan import StagePlan
from hyperpod_ft.processes import descendants, is_running
from hyperpod_ft.runs.job_files import JOB_ID
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.runs.run import Run

_READY, _BEGIN = b"r", b"b"  # between a chain runner and the submission that starts it
_GRACE_SECONDS = 20  # as long as Slurm usually waits between SIGTERM and SIGKILL


@dataclass
class ChainJob:
    """A script of a chain, its state in Slurm's terms, and its process once it has started."""

    stage: str
    job_id: str
    needs: list[str]  # stages of the same chain
    state: str = "PENDING"
    pid: int | None = None


@dataclass
class Chain:
    """The scripts of one submission, in the order they run, and the process that runs them."""

    jobs: list[ChainJob]
    pid: int | None = None

    @classmethod
    def read(cls, path: Path) -> "Chain":
        """Raises ValueError when the file is damaged."""
        return _CHAIN.validate_json(path.read_bytes())

    def write(self, path: Path) -> None:
        publish.write_json(path, asdict(self))


_CHAIN = TypeAdapter(Chain)


@dataclass(frozen=True)
class ProcessLauncher:
    """Plain processes on this machine."""

    name: str = "process"
    shares_environment: bool = True

    def submit(self, run: Run, stages: Sequence[StagePlan], submitted: Callable[[Job], None]) -> None:
        """Start the chain runner; it outlives this program and its terminal."""
        first = len(run.jobs()) + 1
        jobs = [Job(stage.name, f"p{first + i}", self.name, utc_now()) for i, stage in enumerate(stages)]
        known = {stage.name for stage in stages}
        chain = Chain(
            [
                ChainJob(job.stage, job.job_id, [need for need in stage.needs if need in known])
                for job, stage in zip(jobs, stages, strict=True)
            ]
        )
        state_file = run.directory / "processes" / f"{jobs[0].job_id}.json"
        chain.write(state_file)
        for job in jobs:
            submitted(job)
        runner = [sys.executable, "-m", "hyperpod_ft.launch.process"]
        here, there = socket.socketpair()
        # closed when this submission is interrupted or killed: the chain runner then runs nothing
        with here, state_file.with_suffix(".out").open("a") as output:
            with there:
                subprocess.Popen(
                    [*runner, run.directory, state_file, str(there.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=[there.fileno()],
                )
            if here.recv(1):  # nothing if the chain runner has died; else it holds its lock
                here.sendall(_BEGIN)

    def states(self, run: Run, jobs: Sequence[Job]) -> dict[str, JobState]:
        wanted = {job.job_id for job in jobs}
        found: dict[str, JobState] = {}
        for state_file, chain in _chains(run):
            alive = _is_alive(state_file)
            for job in chain.jobs:
                state = JobState(job.state, nodes="this machine")
                if job.job_id in wanted and (alive or not state.active):
                    found[job.job_id] = state
        return found

    def active(self, run: Run, jobs: Sequence[Job]) -> list[Job]:
        states = self.states(run, jobs)
        return [job for job in jobs if job.job_id in states and states[job.job_id].active]

    def cancel(self, run: Run, jobs: Sequence[Job]) -> None:
        """Stop the chain runners that have one of the jobs, and the script that a killed one left running."""
        wanted = {job.job_id for job in jobs}
        for state_file, chain in _chains(run):
            if not any(job.job_id in wanted for job in chain.jobs) or not _is_alive(state_file):
                continue
            signalled = False
            deadline = time.monotonic() + 2 * _GRACE_SECONDS
            # asked each time: a runner that was killed may take a moment to die, and its script keeps the lock
            while _is_alive(state_file) and time.monotonic() < deadline:
                if chain.pid is None or not is_running(chain.pid):
                    for job in chain.jobs:
                        if job.state == "RUNNING" and job.pid is not None:
                            stop_tree(job.pid)
                elif not signalled:
                    os.kill(chain.pid, signal.SIGTERM)
                    signalled = True
                time.sleep(0.05)

    def refresh(self, run: Run) -> None:
        """Scripts write to this machine's disk."""

    def advance(self, run: Run) -> str:
        """The chain runner starts the scripts."""
        return ""

    def fetch_log(self, run: Run, job: Job) -> None:
        """Scripts write to this machine's disk."""


def _chains(run: Run) -> Iterator[tuple[Path, Chain]]:
    """The chain of each submission, with the file that holds its states."""
    for state_file in sorted((run.directory / "processes").glob("*.json")):
        try:
            yield state_file, Chain.read(state_file)
        except ValueError as error:
            raise UserError(f"{state_file}: is damaged", "remove it once its processes have ended") from error


def _is_alive(state_file: Path) -> bool:
    with suppress(FileNotFoundError), state_file.with_suffix(".lock").open() as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def run_chain(directory: Path, state_file: Path, submission: socket.socket) -> None:
    """Run the scripts one after the other once the submission says so; SIGTERM stops the one that runs and the rest."""
    run = Run.open(directory)
    chain = Chain.read(state_file)
    with publish.lock(state_file.with_suffix(".lock")) as held:
        chain.pid = os.getpid()
        chain.write(state_file)
        with submission:
            submission.sendall(_READY)
            if not submission.recv(1):
                return
        signal.signal(signal.SIGTERM, _raise_interrupt)
        try:
            for job in chain.jobs:
                states = {other.stage: other.state for other in chain.jobs}
                if any(states[need] != "COMPLETED" for need in job.needs):
                    job.state = "CANCELLED"
                    continue
                with run.log(job.stage, job.job_id).open("ab") as log:
                    script = _start(run, job.stage, job.job_id, log, held)
                job.state, job.pid = "RUNNING", script.pid
                chain.write(state_file)
                job.state = _finish(script)
        except KeyboardInterrupt:
            for job in chain.jobs:
                if job.state in ("PENDING", "RUNNING"):
                    job.state = "CANCELLED"
        chain.write(state_file)


def _start(run: Run, stage: str, job_id: str, log: IO[bytes], held: int) -> "subprocess.Popen[bytes]":
    # as on a node outside any allocation, also when the kit itself runs inside one
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment[JOB_ID] = job_id
    return subprocess.Popen(
        ["bash", str(run.script(stage))],
        cwd=run.directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        # the script holds the lock too: it is found and can be stopped even if the chain runner was killed
        pass_fds=[held],
    )


def _finish(script: "subprocess.Popen[bytes]") -> str:
    try:
        return "COMPLETED" if script.wait() == 0 else "FAILED"
    except KeyboardInterrupt:
        stop_tree(script.pid)
        raise


def stop_tree(root: int) -> None:
    """End a process and all its descendants: SIGTERM first, so that training can save a checkpoint, then SIGKILL."""
    # torchrun's workers lead separate sessions, so that a process group would not reach them
    tree = [root, *descendants(root)]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in tree:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline and any(is_running(pid) for pid in tree):
            time.sleep(0.05)


def _raise_interrupt(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    run_chain(Path(sys.argv[1]), Path(sys.argv[2]), socket.socket(fileno=int(sys.argv[3])))
