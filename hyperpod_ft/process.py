"""Launcher `process`: the same rendered scripts as plain processes, in dependency order, where there is no Slurm.

A supervisor process, detached from the terminal, runs the scripts of one submission one after the other. It keeps
their states in one file, and holds a lock for as long as it lives, which is how others tell that it does.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperpod_ft import publish
from hyperpod_ft.launcher import JobState
from hyperpod_ft.plan import StagePlan
from hyperpod_ft.run import Job, Run, utc_now

_GRACE_SECONDS = 20  # as long as Slurm usually waits between SIGTERM and SIGKILL


@dataclass(frozen=True)
class Process:
    """Plain processes on this machine."""

    name: str = "process"

    def submit(self, run: Run, stages: Sequence[StagePlan], submitted: Callable[[Job], None]) -> None:
        """Start the supervisor; it goes on when this program and its terminal are gone."""
        first = len(run.jobs()) + 1
        jobs = [Job(stage.name, f"p{first + i}", self.name, utc_now()) for i, stage in enumerate(stages)]
        known = {stage.name for stage in stages}
        chain = [
            {
                "stage": job.stage,
                "job_id": job.job_id,
                "needs": [n for n in stage.needs if n in known],
                "state": "PENDING",
            }
            for job, stage in zip(jobs, stages, strict=True)
        ]
        state_file = run.directory / "processes" / f"{jobs[0].job_id}.json"
        publish.write_json(state_file, {"pid": None, "jobs": chain})
        for job in jobs:
            submitted(job)
        ready, tell = os.pipe()
        with os.fdopen(ready) as told:
            subprocess.Popen(
                [sys.executable, "-m", "hyperpod_ft.process", str(run.directory), str(state_file), str(tell)],
                stdin=subprocess.DEVNULL,
                stdout=(state_file.with_suffix(".out")).open("a"),
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[tell],
            )
            os.close(tell)
            told.read()  # returns when the supervisor holds its lock, or has died

    def states(self, run: Run, jobs: Sequence[Job]) -> dict[str, JobState]:
        wanted = {job.job_id for job in jobs}
        found: dict[str, JobState] = {}
        for state_file in (run.directory / "processes").glob("*.json"):
            content = json.loads(state_file.read_text(encoding="utf-8"))
            alive = _is_alive(state_file)
            for job in content["jobs"]:
                state = JobState(job["state"], nodes="this machine")
                if job["job_id"] in wanted and (alive or not state.active):
                    found[job["job_id"]] = state
        return found

    def cancel(self, run: Run, jobs: Sequence[Job]) -> None:
        """Stop the supervisors that have one of the jobs; returns when they are gone."""
        wanted = {job.job_id for job in jobs}
        for state_file in (run.directory / "processes").glob("*.json"):
            content = json.loads(state_file.read_text(encoding="utf-8"))
            if not any(job["job_id"] in wanted for job in content["jobs"]) or not _is_alive(state_file):
                continue
            with suppress(ProcessLookupError):
                os.kill(content["pid"], signal.SIGTERM)
            deadline = time.monotonic() + 2 * _GRACE_SECONDS
            while _is_alive(state_file) and time.monotonic() < deadline:
                time.sleep(0.05)


def _is_alive(state_file: Path) -> bool:
    with suppress(FileNotFoundError), state_file.with_suffix(".lock").open() as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def supervise(directory: Path, state_file: Path, ready: int) -> None:
    """Run the submission's scripts; SIGTERM stops the one that runs and cancels the rest."""
    run = Run.open(directory)
    content: dict[str, Any] = json.loads(state_file.read_text(encoding="utf-8"))
    with publish.lock(state_file.with_suffix(".lock")):
        content["pid"] = os.getpid()
        publish.write_json(state_file, content)
        os.close(ready)
        signal.signal(signal.SIGTERM, _raise_interrupt)
        try:
            for job in content["jobs"]:
                others = {other["stage"]: other["state"] for other in content["jobs"]}
                ready_to_run = all(others[need] == "COMPLETED" for need in job["needs"])
                job["state"] = "RUNNING" if ready_to_run else "CANCELLED"
                publish.write_json(state_file, content)
                if ready_to_run:
                    job["state"] = _run_script(run, job["stage"], job["job_id"])
        except KeyboardInterrupt:
            for job in content["jobs"]:
                if job["state"] in ("PENDING", "RUNNING"):
                    job["state"] = "CANCELLED"
        publish.write_json(state_file, content)


def _run_script(run: Run, stage: str, job_id: str) -> str:
    # as on a node outside any allocation, also when the kit itself runs inside one
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment["HYPERPOD_FT_JOB_ID"] = job_id
    with run.log(stage, job_id).open("ab") as log:
        script = subprocess.Popen(
            ["bash", str(run.script(stage))],
            cwd=run.directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return "COMPLETED" if script.wait() == 0 else "FAILED"
    except KeyboardInterrupt:
        _stop(script)
        raise


def _stop(script: "subprocess.Popen[bytes]") -> None:
    # torchrun's workers lead sessions of their own, so the tree is walked; they get a moment to save a checkpoint
    tree = [script.pid, *_descendants(script.pid)]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in tree:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline and any(_exists(pid) for pid in tree):
            script.poll()
            time.sleep(0.05)


def _descendants(root: int) -> list[int]:
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in listing.splitlines():
        pid, parent = map(int, line.split())
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _raise_interrupt(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    supervise(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
