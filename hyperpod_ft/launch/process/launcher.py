"""Launcher `process`: the same rendered scripts as plain processes, in dependency order, without Slurm.

A chain runner, a process detached from the terminal, runs the scripts of one submission one after the other. It keeps
their states in one file, and holds a lock while it runs, so that others can see that it does.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, ClassVar

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.interface import After, Dependency, JobState, Launcher
from hyperpod_ft.launch.process.chain import Chain, ChainJob, chains, is_alive, job_states
from hyperpod_ft.planning.plan import StagePlan
from hyperpod_ft.processes import is_running, signal_all, tree
from hyperpod_ft.runs.job_files import JOB_ID
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import RunPaths

_READY, _BEGIN = b"r", b"b"  # between a chain runner and the submission that starts it
_GRACE_SECONDS = 20  # as long as Slurm usually waits between SIGTERM and SIGKILL
_LOOK_SECONDS = 0.2


class ProcessLauncher(Launcher):
    """Plain processes on this machine."""

    name: ClassVar[str] = "process"

    def submit(self, run: Run, stages: Sequence[StagePlan], after: After) -> None:
        """Start the chain runner; it outlives this program and its terminal.

        Raises UserError for the ranks of several nodes with accelerators, of which this machine has one node's.
        """
        cluster = run.config.cluster
        if run.config.instance.has_accelerators and cluster.nodes > 1 and any(stage.starts_ranks for stage in stages):
            raise UserError(
                f"cluster.nodes: plain processes run on one machine, which has not the accelerators of {cluster.nodes}",
                "set it to 1, or submit to Slurm",
            )
        first = len(run.journal.jobs()) + 1
        jobs = {stage.name: Job(stage.name, f"p{first + i}", self.name, utc_now()) for i, stage in enumerate(stages)}
        chain = Chain([])
        for stage in stages:
            own = [Dependency(str(run.paths.directory), jobs[need].job_id) for need in stage.needs if need in jobs]
            chain.jobs.append(ChainJob(stage.name, jobs[stage.name].job_id, [*own, *after.get(stage.name, ())]))
        state_file = run.paths.directory / "processes" / f"p{first}.json"
        chain.write(state_file)
        for job in jobs.values():
            run.journal.add_job(job)
        runner = [sys.executable, "-m", "hyperpod_ft.launch.process.launcher"]
        here, there = socket.socketpair()
        # closed when this submission is interrupted or killed: the chain runner then runs nothing
        with here, state_file.with_suffix(".out").open("a") as output:
            with there:
                subprocess.Popen(
                    [*runner, run.paths.directory, state_file, str(there.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=[there.fileno()],
                )
            if here.recv(1):  # nothing if the chain runner has died; else it holds its lock
                here.sendall(_BEGIN)

    def states(self, run: Run, jobs: Sequence[Job]) -> Mapping[Job, JobState]:
        known = job_states(run.paths.directory)  # the chain runner begins when all its jobs are recorded
        return {job: known[job.job_id] for job in jobs if job.job_id in known}

    def cancel(self, run: Run, jobs: Sequence[Job]) -> None:
        """Stop the chain runners that have one of the jobs, and the script that a killed one left running.

        Raises UserError for a chain of another user, who could have written any process into its file.
        """
        wanted = {job.job_id for job in jobs}
        for state_file, chain in chains(run.paths.directory):
            if not any(job.job_id in wanted for job in chain.jobs) or not is_alive(state_file):
                continue
            if state_file.lstat().st_uid != os.getuid():
                raise UserError(f"{state_file}: belongs to another user", "only that user can cancel these processes")
            signalled = False
            deadline = time.monotonic() + 2 * _GRACE_SECONDS
            # asked each time: a runner that was killed may take a moment to die, and its script keeps the lock
            while is_alive(state_file) and time.monotonic() < deadline:
                if chain.pid is None or not is_running(chain.pid):
                    for job in chain.jobs:
                        if job.state == "RUNNING" and job.pid is not None:
                            stop_tree(job.pid)
                elif not signalled:
                    os.kill(chain.pid, signal.SIGTERM)
                    signalled = True
                time.sleep(0.05)


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
                if not _wait(job.dependencies):
                    job.state = "CANCELLED"
                    chain.write(state_file)
                    continue
                with run.paths.log(job.stage, job.job_id).open("ab") as log:
                    script = _start(run.paths, job.stage, job.job_id, log, held)
                job.state, job.pid = "RUNNING", script.pid
                chain.write(state_file)
                job.state = _finish(script)
                chain.write(state_file)
        except KeyboardInterrupt:
            for job in chain.jobs:
                if job.state in ("PENDING", "RUNNING"):
                    job.state = "CANCELLED"
        chain.write(state_file)


def _wait(dependencies: Sequence[Dependency]) -> bool:
    """Wait until these jobs have ended; returns False when one that must succeed has not."""
    for other in dependencies:
        while (state := job_states(Path(other.directory)).get(other.job_id)) is not None and state.active:
            time.sleep(_LOOK_SECONDS)
        if other.must_succeed and (state is None or state.state != "COMPLETED"):
            return False
    return True


def _start(paths: RunPaths, stage: str, job_id: str, log: IO[bytes], held: int) -> "subprocess.Popen[bytes]":
    # as on a node outside any allocation, also when the kit itself runs inside one
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment[JOB_ID] = job_id
    return subprocess.Popen(
        ["bash", str(paths.script(stage))],
        cwd=paths.directory,
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
    pids = tree(root)
    for number in (signal.SIGTERM, signal.SIGKILL):
        signal_all(pids, number)
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline and any(map(is_running, pids)):
            time.sleep(0.05)


def _raise_interrupt(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    run_chain(Path(sys.argv[1]), Path(sys.argv[2]), socket.socket(fileno=int(sys.argv[3])))
