"""What starts a run's stages: a real Slurm (`slurm/`), plain processes (`process/`), or an annex's launcher, such as
that of SageMaker training jobs. Each says itself what is different where its jobs run."""

from __future__ import annotations  # the types below are not imported: process/chain.py imports this to stay light

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from hyperpod_ft.config.run_config import RunConfig
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
class LauncherAnswer:
    """What a launcher knows of a run's jobs, and what it did when it was asked."""

    states: Mapping[Job, JobState]  # of those that it still knows
    created: str = ""  # the id of the job that it has just created
    note: str = ""  # why it could not bring the run's files here, or create the job whose turn it is


@dataclass(frozen=True)
class Dependency:
    """A job that another one waits for: of the same run, or of one that shares stages with it."""

    directory: str  # of its run
    job_id: str
    must_succeed: bool = True  # otherwise it may end in any way


After = Mapping[str, Sequence[Dependency]]
"""What the jobs of a submission wait for besides one another, by stage."""


@dataclass(frozen=True)
class JobPreview:
    """A job of several stages that another launcher than Slurm would create."""

    launcher: str
    name: str
    stages: tuple[str, ...]
    instances: str  # 2 x ml.p4d.24xlarge
    image: str  # its URI, or why there is none
    seconds: int  # its time limit


class Launcher(Protocol):
    """Starts the scripts of a run, knows the state of their jobs, and stops them; and says where these jobs run.

    What is written out here is true of jobs that run on this machine, or on nodes that share its volume.
    """

    name: ClassVar[str]  # `slurm`, `process` or `sagemaker`
    # Whether its jobs write to this machine's volume, use the environments there, and can wait for those of other runs.
    shares_volume: ClassVar[bool] = True
    # Whether a job runs several stages, one after the other, and is created when its turn comes.
    groups_stages: ClassVar[bool] = False

    def submit(self, run: Run, stages: Sequence[StagePlan], after: After) -> None:
        """Submit the stages' scripts, each to start when those of `stages` that it needs have succeeded.

        Records each job of the run at once, so that a crash half-way leaves none unrecorded. `after` is empty without
        `shares_volume`.
        """

    def states(self, run: Run, jobs: Sequence[Job], *, keep_going: bool) -> LauncherAnswer:
        """The states of the jobs, and of others of the run that are not recorded: a submission may have been killed.

        Without `shares_volume`, this brings the run's small files here. With `groups_stages` and `keep_going`, it also
        creates the next job. Otherwise it starts nothing.
        """

    def log(self, run: Run, job: Job) -> Path | None:
        """What a job has printed so far, as a file on this machine; None before it has printed anything."""
        return run.journal.log_here(job.stage, job.job_id)

    def cancel(self, run: Run, jobs: Sequence[Job]) -> None:
        """Stop the jobs and every process they started."""

    def previews(self, run: Run, stages: Sequence[StagePlan]) -> Sequence[JobPreview]:
        """The jobs that it would create for these stages, where they are not one a stage."""
        return ()

    def has_own_python(self, config: RunConfig) -> bool:
        """Whether the run's jobs may be on machines that have other interpreters than this one."""
        return False

    def location(self, run: Run, path: Path) -> str:
        """Where a path of a run is, or will be, whose newest jobs it has: here, or a URL where they have left it."""
        return str(path)

    def bring_outputs(self, run: Run, directories: Sequence[Path]) -> None:
        """Bring what the records list below these directories here, as far as this machine lacks it.

        May be killed at any moment and called again: complete files stay. Raises UserError when that fails.
        """
        return
