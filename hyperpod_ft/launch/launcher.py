"""What starts a run's scripts: a real Slurm (`slurm.py`), or plain processes (`process.py`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from hyperpod_ft.planning.plan import StagePlan
    from hyperpod_ft.runs.records import Job
    from hyperpod_ft.runs.run import Run

# Slurm's long names of the states that a job never leaves; any other, also one of a version to come, may still work.
_TERMINAL = {
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"),
    *("PREEMPTED", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"),
}


@dataclass(frozen=True)
class JobState:
    """What the launcher says about a job, in Slurm's words."""

    state: str  # PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL, OUT_OF_MEMORY, ...
    reason: str = ""
    elapsed: str = ""
    nodes: str = ""

    @property
    def active(self) -> bool:
        return self.state not in _TERMINAL


class Launcher(Protocol):
    """The one boundary between the kit and what runs its scripts."""

    @property
    def name(self) -> str:
        """`slurm` or `process`."""

    def submit(self, run: "Run", stages: Sequence["StagePlan"], submitted: Callable[["Job"], None]) -> None:
        """Submit the stages' scripts, each to start when those of `stages` that it needs have succeeded.

        Calls `submitted` for each as soon as it is known, so that a crash half-way leaves no job unknown.
        """

    def states(self, run: "Run", jobs: Sequence["Job"]) -> Mapping[str, JobState]:
        """State by job id, of the jobs the launcher still knows."""

    def active(self, run: "Run", jobs: Sequence["Job"]) -> Sequence["Job"]:
        """Those of `jobs` that wait or work, and any other job of the run that the launcher knows of.

        A submission that was killed half-way may have left one that it could not write down.
        """

    def cancel(self, run: "Run", jobs: Sequence["Job"]) -> None:
        """Stop the jobs and all that they started."""
