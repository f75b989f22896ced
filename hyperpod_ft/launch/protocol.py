"""The interface that starts a run's stages: a real Slurm (`slurm/`), plain processes (`process/`), or SageMaker
training jobs (`sagemaker/`)."""

from __future__ import annotations  # the types below are not imported: process/chain.py imports this to stay light

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from hyperpod_ft.planning.plan import StagePlan
    from hyperpod_ft.runs.jobs import Job
    from hyperpod_ft.runs.run import Run

# Slurm's long names of the states that a job never leaves. In any other, also one of a later version, it is active.
_TERMINAL = {
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"),
    *("PREEMPTED", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"),
}


@dataclass(frozen=True)
class JobState:
    """A launcher's answer about a job, in Slurm's terms."""

    state: str  # PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL, OUT_OF_MEMORY, ...
    reason: str = ""
    elapsed: str = ""
    nodes: str = ""

    @property
    def active(self) -> bool:
        return self.state not in _TERMINAL


@dataclass(frozen=True)
class JobOfRun:
    """A job, and the run that it belongs to."""

    run: Run
    job: Job
    just_submitted: bool = False  # jobs that were submitted earlier do not wait for it


@dataclass(frozen=True)
class AwaitedJobs:
    """The jobs that a chain waits for besides those it consists of."""

    # By stage: a job, perhaps of another run, that is about to do the stage. Jobs that need the stage wait for its
    # success.
    doing: Mapping[str, JobOfRun] = field(default_factory=dict)
    # jobs of other runs that must have ended, in whatever way, before a stage that starts ranks begins
    before_ranks: Sequence[JobOfRun] = ()


NOTHING_ELSE = AwaitedJobs()


class Launcher(Protocol):
    """Starts the scripts of a run, knows the state of their jobs, and stops them."""

    name: ClassVar[str]  # `slurm`, `process` or `sagemaker`
    # whether its jobs use the environment below `cluster.root`; otherwise each creates its own
    shares_environment: ClassVar[bool]
    can_wait_for_other_runs: ClassVar[bool]  # whether its jobs can wait for jobs of other runs

    def submit(
        self,
        run: Run,
        stages: Sequence[StagePlan],
        submitted: Callable[[Job], None],
        awaited: AwaitedJobs = NOTHING_ELSE,
    ) -> None:
        """Submit the stages' scripts, each to start when those of `stages` that it needs have succeeded.

        `awaited`: what else they wait for; nothing unless the launcher `can_wait_for_other_runs`. Calls `submitted` for
        each job at once, so that a crash half-way leaves no job unrecorded.
        """

    def states(self, run: Run, jobs: Sequence[Job]) -> Mapping[str, JobState]:
        """State by job id, of those jobs that the launcher still knows."""

    def active(self, run: Run, jobs: Sequence[Job]) -> Sequence[Job]:
        """The jobs in `jobs` that have not ended, and any other job of the run that the launcher knows.

        A submission that was killed half-way may have left a job unrecorded.
        """

    def cancel(self, run: Run, jobs: Sequence[Job]) -> None:
        """Stop the jobs and every process they started."""

    def refresh(self, run: Run) -> None:
        """Bring the run's small files here, unless its jobs write to a volume that this machine sees."""

    def advance(self, run: Run) -> str:
        """`refresh`, then create the job whose turn it is, where jobs do not wait for one another themselves.

        Returns its id, or an empty string if no job is due.
        """

    def fetch_log(self, run: Run, job: Job) -> None:
        """Bring what a job has written so far to `Run.fetched_log`, unless its log is on a volume that this machine
        sees."""
