"""How attempts at a training run ended, and the restarts of a run: the attempts that were followed by another."""

import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import FiniteFloat, TypeAdapter, ValidationError

from hyperpod_ft import publish
from hyperpod_ft.errors import EXIT_USER_ERROR
from hyperpod_ft.runs.job_files import NOTICE, NOTICE_STATUS
from hyperpod_ft.runs.journal import Journal
from hyperpod_ft.runs.records import UtcTime
from hyperpod_ft.runs.run_paths import RunPaths

_SIGNAL_NAMES = {known.value: known.name for known in signal.Signals}


@dataclass(frozen=True)
class NodeFailure:
    """How the processes of one node failed."""

    node: str
    rank: int | None  # that failed first; None: no rank was started, because the node is unfit
    status: int  # as a shell reports it: 128 + N for signal N
    time: FiniteFloat  # Unix time, seconds
    hang: str = ""  # where the rank hung, and what shows it


@dataclass(frozen=True)
class Attempt:
    """One start of a run's ranks that has ended, or was still running when its time was up."""

    job_id: str
    time: UtcTime  # when it ended
    status: int  # exit status of its command
    recorded: bool  # the stage's record is written: the stage is done, however its processes ended
    failures: tuple[NodeFailure, ...]
    signal: int  # that asked the job to stop; 0: none
    resumed_from: int  # step of the newest checkpoint when the job began; 0: none
    checkpoint: int  # the same, at the end of the attempt; on the volume, not in the nodes' memory
    step: int  # the last one that was logged
    measured: bool = False  # objective dpo: since the job began, more of the reference was measured
    left: bool = False  # processes of it may still hang on a node
    grows: bool = False  # it was asked to save because more nodes are idle
    nodes: int = 0  # that it had; 0: not known

    @property
    def first_failure(self) -> NodeFailure | None:
        """A user's error if there is one, else a hang, else the first failure. Clocks of nodes may differ a little.

        Among failures within one second, an exit status of 1 comes last: it may be a peer's echo of another failure.
        """
        return min(
            self.failures,
            key=lambda failure: (
                failure.status != EXIT_USER_ERROR,
                not failure.hang,
                int(failure.time),
                failure.status == 1,
                failure.time,
            ),
            default=None,
        )

    @property
    def cause(self) -> Literal["crash", "time limit", "more nodes"]:
        """What ended it, if it failed."""
        first = self.first_failure
        notified = self.signal == NOTICE or (first is not None and first.status == NOTICE_STATUS)
        if not notified:
            return "crash"
        return "more nodes" if self.grows else "time limit"

    @property
    def reason(self) -> str:
        """For example `rank 3: exit 1 at step 12`, or `rank 3 on node2 hangs in step 13: its process is stopped`."""
        if self.cause != "crash":
            return self.cause
        first = self.first_failure
        if first is None or first.rank is None:
            return f"exit {self.status} at step {self.step}, and no rank reported why"
        if first.hang:
            return f"rank {first.rank} on {first.node} hangs {first.hang}"
        ended = _SIGNAL_NAMES.get(first.status - 128, f"exit {first.status}")
        return f"rank {first.rank}: {ended} at step {self.step}"

    def as_dict(self) -> dict[str, Any]:
        """The fields, cause and reason, for JSON."""
        return asdict(self) | {"cause": self.cause, "reason": self.reason}

    def next_began(self, resumed_from: Sequence[int]) -> int:
        """The step that training resumed from after it: of `checkpoint`, or a later one that the nodes had in memory.

        `resumed_from`: all steps that the training resumed from, as its record has them.
        """
        return max((step for step in resumed_from if self.checkpoint < step <= self.step), default=self.checkpoint)


_ATTEMPTS = TypeAdapter(list[Attempt])


def history(paths: RunPaths, stage: str) -> list[Attempt]:
    """Every restart of a stage of the run, oldest first; empty when the file is missing or unreadable."""
    try:
        return _ATTEMPTS.validate_json(paths.restarts_path(stage).read_bytes())
    except (OSError, ValidationError):
        return []


def of_submission(journal: Journal, stage: str, job_id: str) -> list[Attempt]:
    """The restarts of a job and of those submitted with it, oldest first: a training job may continue another."""
    every = history(journal.paths, stage)
    if not every:
        return []
    jobs = journal.jobs()
    submitted = {job.submitted for job in jobs if job.job_id == job_id}
    together = {job_id, *(job.job_id for job in jobs if job.submitted in submitted)}
    return [restart for restart in every if restart.job_id in together]


def add(paths: RunPaths, stage: str, restart: Attempt) -> None:
    """Append a restart to the history."""
    publish.write_json(paths.restarts_path(stage), [attempt.as_dict() for attempt in [*history(paths, stage), restart]])


def forget(paths: RunPaths, stage: str, job_id: str) -> None:
    """Remove the restarts of an earlier job of the same id: of another Slurm, or started by hand."""
    known = history(paths, stage)
    if any(restart.job_id == job_id for restart in known):
        publish.write_json(
            paths.restarts_path(stage), [restart.as_dict() for restart in known if restart.job_id != job_id]
        )


def describe(restarts: Sequence[Attempt], allowed: int) -> str:
    """For example `restart 1 of 3 (rank 3: exit 1 at step 12), continued once after its time limit`."""
    crashes = [restart for restart in restarts if restart.cause == "crash"]
    parts = []
    if crashes:
        parts.append(f"restart {len(crashes)} of {allowed} ({crashes[-1].reason})")
    for cause, words in (("time limit", "after its time limit"), ("more nodes", "on more nodes")):
        if times := sum(restart.cause == cause for restart in restarts):
            parts.append(f"continued {'once' if times == 1 else f'{times} times'} {words}")
    return ", ".join(parts)
