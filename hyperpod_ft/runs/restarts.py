"""The restarts of a run: each attempt at a training that was cut short and followed by another."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from hyperpod_ft import publish
from hyperpod_ft.runs.run import Run


@dataclass(frozen=True)
class Restart:
    """An attempt at a training that was followed by another."""

    job_id: str
    time: str  # ISO 8601, UTC
    cause: Literal["crash", "time limit"]
    reason: str
    step: int
    checkpoint: int


def history(run: Run, stage: str) -> list[Restart]:
    """Every restart of a stage of the run, oldest first; empty when the file is missing or unreadable."""
    try:
        return [Restart(**entry) for entry in json.loads(run.restarts(stage).read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []


def add(run: Run, stage: str, restart: Restart) -> None:
    """Append a restart to the history."""
    publish.write_json(run.restarts(stage), [asdict(known) for known in [*history(run, stage), restart]])


def forget(run: Run, stage: str, job_id: str) -> None:
    """Remove the restarts of an earlier job of the same id: of another Slurm, or started by hand."""
    known = history(run, stage)
    if any(restart.job_id == job_id for restart in known):
        publish.write_json(run.restarts(stage), [asdict(restart) for restart in known if restart.job_id != job_id])


def describe(restarts: Sequence[Restart], allowed: int) -> str:
    """A job's restarts in words: `restart 1 of 3 (rank 3: exit 1 at step 12), requeued once at its time limit`."""
    crashes = [restart for restart in restarts if restart.cause == "crash"]
    requeued = len(restarts) - len(crashes)
    parts = []
    if crashes:
        parts.append(f"restart {len(crashes)} of {allowed} ({crashes[-1].reason})")
    if requeued:
        parts.append(f"requeued {'once' if requeued == 1 else f'{requeued} times'} at its time limit")
    return ", ".join(parts)
