"""A user who submits a run and resumes it until it is done, while faults hit it."""

import random
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from benchmarks.soaking.cases import CASES, run_file
from benchmarks.soaking.faults import Fault, Faults
from benchmarks.soaking.shim import NODES
from benchmarks.soaking.site import Site, SlurmJob
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.job_files import hangs
from hyperpod_ft.runs.run import Run

_TICK_S = 0.3
_LOOK_S = 5.0
_STUCK_S = 240.0
_WITHOUT_PROCESSES_S = 30.0
_TIMES_FREED = 20
_COMMAND_S = 240
# The stages that moments of faults wait for, and how many moments each gets; starts of ranks are dear.
_MOMENTS = {
    "env": (0, 1),
    "download": (2, 4),
    "certify": (1, 2),
    "dataset": (3, 5),
    "precompile": (1, 3),
    "train": (5, 8),
    "consolidate": (2, 4),
    "merge": (2, 4),
    "generate": (1, 2),
}
_MILD_PER_RUN = 60
_MILD_EVERY_S = 5.0  # on average


class HangError(Exception):
    """Nothing has happened for too long; the message says where."""


@dataclass
class User:
    """One run of a case. `disturbed`: whether faults are injected; `found` collects what should not be.

    `say` prints each fault.
    """

    site: Site
    case: str
    rng: random.Random
    say: Callable[[Fault], None]
    neuron_python: Path | None = None
    disturbed: bool = True
    spans: dict[str, float] = field(default_factory=dict)  # seconds that each stage's job takes undisturbed
    found: list[str] = field(default_factory=list)
    killed_submissions: int = 0
    commands: int = 0

    def __post_init__(self) -> None:
        self.injected: list[Fault] = []
        nodes = NODES[1 : 1 + max(2, CASES[self.case]["nodes"])]
        with_fewer = "min_nodes" in CASES[self.case].get("cluster", {})
        self.faults = Faults(self.site, self.rng, self.log, nodes, with_fewer)
        self._hangs: set[Path] = set()
        self.path = self.site.directory / f"{self.case}.yaml"
        self.path.write_text(yaml.safe_dump(run_file(self.case, self.site.root, self.neuron_python)))
        low_high = _MOMENTS.items() if self.disturbed else ()
        self.moments = [stage for stage, bounds in low_high for _ in range(self.rng.randint(*bounds))]
        self.acts = self.rng.randint(4, 8) if self.disturbed else 0
        self._mild = _MILD_PER_RUN if self.disturbed else 0
        self._mild_at = self._looked_at = 0.0
        self._freed = 0
        self._started: dict[str, float] = {}  # when each job was first seen running
        self._moment_at: dict[str, float] = {}

    def log(self, fault: Fault) -> None:
        """Count a fault."""
        self.injected.append(fault)
        self.say(fault)

    def go(self) -> Run:
        """Submit, and resume until every stage is done; returns the run. Raises HangError."""
        self._command("submit", str(self.path))
        changed_at, before = time.monotonic(), ""
        while True:
            self.faults.tick()
            jobs = self.site.jobs()
            run = self._run()
            done = [stage.name for stage in run.plan.stages if run.journal.is_done(stage.name)] if run else []
            if run:
                self._look_for_hangs(run)
            state = f"{jobs} {done} {run and run.paths.metrics_path.exists() and run.paths.metrics_path.stat().st_size}"
            if state != before:
                changed_at, before = time.monotonic(), state
            if self._is_stuck(time.monotonic() - changed_at, state):
                self._command("cancel", str(self.path))
                changed_at = time.monotonic()
            if jobs is None:
                time.sleep(_TICK_S)
                continue
            self._look_for_doubles(jobs)
            self._look_after_slurm(jobs)
            if run and len(done) == len(run.plan.stages) and not jobs:
                self.faults.end_all()
                return run
            if jobs:
                self._disturb(jobs)
            elif not self.disturbed:
                raise HangError(f"an undisturbed run has failed after {done}")
            elif self.rng.random() < 0.3:
                self._resume()
            time.sleep(_TICK_S)

    def _run(self) -> Run | None:
        """The run, once it has a directory that can be read."""
        for frozen in self.site.root.glob(f"runs/{self.case}/*/run.yaml"):
            try:
                return Run.open(frozen.parent)
            except (UserError, OSError):
                return None
        return None

    def _is_stuck(self, seconds: float, state: str) -> bool:
        """Whether a user would lose patience. It is a finding if processes of the run are still there.

        Slurm lists a job as running for minutes after its step daemon was killed with all of its processes. Raises
        HangError when that has happened too often.
        """
        if seconds < _WITHOUT_PROCESSES_S:
            return False
        at_work = [f"{process.role} {process.pid} of {process.stage}" for process in self.site.processes()]
        if at_work and seconds < _STUCK_S:
            return False
        if at_work:
            self.found.append(f"nothing has changed for {_STUCK_S:.0f} s: {state}; processes: {at_work}")
        self._freed += 1
        if self._freed > _TIMES_FREED:
            raise HangError(f"nothing changes: {state}")
        return True

    def _look_after_slurm(self, jobs: list[SlurmJob]) -> None:
        """Give back nodes that Slurm has drained, and cancel jobs that it holds.

        Slurm saves its state every few seconds. A slurmctld that is killed and comes back may not know that a job has
        started, and starts it once more; the node refuses, and Slurm drains it and holds the job.
        """
        if time.monotonic() < self._looked_at + _LOOK_S:
            return
        self._looked_at = time.monotonic()
        if not self.faults.node_is_lost:
            self.site.resume_nodes()
        if any("held" in job.reason for job in jobs):
            self._command("cancel", str(self.path))

    def _look_for_hangs(self, run: Run) -> None:
        """It is a finding if a hang is reported though no process was stopped for long."""
        for stacks in set(hangs(run.paths.directory).glob("[!.]*")) - self._hangs:
            self._hangs.add(stacks)
            if not self.faults.explain_hang():
                self.found.append(f"a hang was reported, but nothing hung: {stacks.name}")

    def _look_for_doubles(self, jobs: list[SlurmJob]) -> None:
        names = [job.name for job in jobs if job.state in ("RUNNING", "PENDING")]
        for name in {name for name in names if names.count(name) > 1}:
            text = f"two jobs of {name} at once: {jobs}"
            if text not in self.found:
                self.found.append(text)

    def _disturb(self, jobs: list[SlurmJob]) -> None:
        """Inject the faults whose moment has come, or act as a user who changes his mind."""
        now = time.monotonic()
        for job in jobs:
            if job.state != "RUNNING":
                continue
            begun = self._started.setdefault(job.job_id, now)
            if not self.disturbed:
                self.spans[job.stage] = now - begun
            if job.stage not in self.moments:
                continue
            span = self.spans.get(job.stage, 5.0) + 1
            at = self._moment_at.setdefault(job.stage, begun + self.rng.uniform(0, span))
            if now >= at:
                self.moments.remove(job.stage)
                self._moment_at[job.stage] = now + self.rng.uniform(0, span)
                for _ in range(self.rng.choice((1, 1, 1, 2))):
                    self.faults.draw()
                return
        if self._mild and now >= self._mild_at:
            self._mild -= 1
            self._mild_at = now + self.rng.expovariate(1 / _MILD_EVERY_S)
            self.faults.draw_mild()
        elif self.acts and self.rng.random() < 0.01:
            self.acts -= 1
            self._act(self.faults.stage())

    def _act(self, stage: str) -> None:
        """A user's command while jobs work."""
        if self.rng.random() < 0.5:
            self._command("cancel", str(self.path))
            self.log(Fault("cancel", stage))
        else:
            output = self._command("submit", str(self.path))
            self.log(Fault("submit while at work", stage, output.strip()[-200:]))

    def _resume(self) -> None:
        """Go on after the queue has become empty: mostly in the plain way."""
        run, choice = self._run(), self.rng.random() if self.disturbed else 1.0
        words = ["resume", str(run.paths.directory)] if run and self.rng.random() < 0.5 else ["submit", str(self.path)]
        if choice < 0.1:
            both = [self._start(*words), self._start("submit", str(self.path))]
            self.log(Fault("two submissions at once", "submit"))
            for process in both:
                self._finish(process, "submit, twice")
        elif choice < 0.3:
            process = self._start(*words)
            time.sleep(self.rng.uniform(0.2, 6))
            if process.poll() is None:
                process.kill()
                self.killed_submissions += 1
                self.log(Fault("kill -9: submit", "submit"))
            self._finish(process, "submit, killed")
        elif choice < 0.4:
            process = self._start(*words)
            time.sleep(self.rng.uniform(0.5, 6))
            self._command("cancel", str(self.path))
            self.log(Fault("cancel", "submit"))
            self._finish(process, "submit, cancelled")
        elif choice < 0.6:
            process = self._start(*words)
            time.sleep(self.rng.uniform(0, 1))
            self.faults.draw()
            self._finish(process, " ".join(words))
        else:
            self._finish(self._start(*words), " ".join(words))

    def _command(self, *words: str) -> str:
        return self._finish(self._start(*words), " ".join(words))

    def _start(self, *words: str) -> "subprocess.Popen[str]":
        self.commands += 1
        return self.site.command(*words)

    def _finish(self, process: "subprocess.Popen[str]", words: str) -> str:
        """A command's output. A traceback is a finding."""
        deadline = time.monotonic() + _COMMAND_S
        while process.poll() is None and time.monotonic() < deadline:
            self.faults.tick()
            time.sleep(0.1)
        if process.poll() is None:
            process.kill()
            self.found.append(f"{words}: no end after {_COMMAND_S} s")
        output, _ = process.communicate()
        if process.returncode and not self.disturbed:
            raise RuntimeError(f"{words}: {output}")
        if "Traceback" in output:
            self.found.append(f"{words}: {output[-1500:]}")
        return output
