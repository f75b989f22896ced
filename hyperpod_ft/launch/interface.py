"""What starts a run's stages: a real Slurm (`slurm/`), plain processes (`process/`), or an annex's launcher, such as
that of SageMaker training jobs. Each says itself what is different where its jobs run."""

from __future__ import annotations  # the types below are not imported: process/chain.py imports this to stay light

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pathlib import Path

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


class Launcher(ABC):
    """Starts the scripts of a run, knows the state of their jobs, and stops them; and says where these jobs run.

    Every launcher starts, knows and stops jobs in its own way. What else is said here is true of jobs that run on this
    machine, or on nodes that share its volume; a launcher of other jobs overrides it.
    """

    name: ClassVar[str]  # `slurm`, `process` or `sagemaker`
    # Whether its jobs write to this machine's volume, use the environments there, and can wait for those of other runs.
    shares_volume: ClassVar[bool] = True
    # Whether the stages of a run with env.container run in it.
    starts_containers: ClassVar[bool] = False
    # Whether a job runs several stages, one after the other, and is created when its turn comes.
    groups_stages: ClassVar[bool] = False

    def check(self, run: Run, stages: Sequence[StagePlan]) -> None:
        """Look at what `submit` needs, before anything of the run is copied to where the jobs will see it.

        Raises UserError for what is certain to fail.
        """
        return

    @abstractmethod
    def submit(self, run: Run, stages: Sequence[StagePlan], after: After) -> None:
        """Submit the stages' scripts, each to start when those of `stages` that it needs have succeeded.

        Records each job of the run at once, so that a crash half-way leaves none unrecorded. `after` is empty without
        `shares_volume`.
        """

    @abstractmethod
    def states(self, run: Run, jobs: Sequence[Job]) -> Mapping[Job, JobState]:
        """The states of the jobs, and of others of the run that are not recorded: a submission may have been killed.

        Of those that it still knows. Without `shares_volume`, this brings the run's small files here. Starts nothing.
        Raises UserError without an answer.
        """

    def advance(self, run: Run) -> str:
        """With `groups_stages`, create the job whose turn it is, and return its id; empty if none is.

        Raises UserError when it is refused.
        """
        return ""

    def log(self, run: Run, job: Job) -> Path | None:
        """What a job has printed so far, as a file on this machine; None before it has printed anything."""
        return run.journal.log_here(job.stage, job.job_id)

    @abstractmethod
    def cancel(self, run: Run, jobs: Sequence[Job]) -> None:
        """Stop the jobs and every process they started."""

    def previews(self, run: Run, stages: Sequence[StagePlan]) -> Sequence[JobPreview]:
        """The jobs that it would create for these stages, where they are not one a stage."""
        return ()

    def location(self, run: Run, path: Path) -> str:
        """Where a path of a run is, or will be, whose newest jobs it has: here, or a URL where they have left it."""
        return str(path)

    def bring_outputs(self, run: Run, directories: Sequence[Path]) -> None:
        """Bring what the records list below these directories here, as far as this machine lacks it.

        May be killed at any moment and called again: complete files stay. Raises UserError when that fails.
        """
        return  # they are here
