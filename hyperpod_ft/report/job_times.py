"""When the jobs of a run waited, started, worked and ended, from the files that they left."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyperpod_ft.report.timeline import AttemptTimes, JobTimes
from hyperpod_ft.runs import attempts
from hyperpod_ft.runs.job_files import banner
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.journal import Journal
from hyperpod_ft.runs.records import ISO_UTC_PATTERN, Record, unix_time
from hyperpod_ft.runs.results import usage
from hyperpod_ft.runs.run_paths import RunPaths

_HEAD_BYTES = 1 << 16  # of a log: the script's banner comes first


def job_times(
    journal: Journal, records: Mapping[str, Record], metrics: Mapping[str, Sequence[float | None]]
) -> list[JobTimes]:
    """Every job of the run in the order of its stages; jobs of one stage in the order of their submission."""
    jobs = journal.jobs()
    order: dict[str, int] = {stage.name: number for number, stage in enumerate(journal.plan.stages)}
    found = [_times(journal, job, jobs, records.get(job.stage), metrics) for job in jobs if job.stage in order]
    return sorted(found, key=lambda times: (order[times.stage], times.submitted))


def _times(
    journal: Journal,
    job: Job,
    jobs: Sequence[Job],
    record: Record | None,
    metrics: Mapping[str, Sequence[float | None]],
) -> JobTimes:
    submitted = unix_time(job.submitted)
    later = [other.submitted for other in jobs if other.stage == job.stage and other.submitted > job.submitted]
    replaced = unix_time(min(later)) if later else None
    started = _started(journal, job)
    work = None
    # earlier records may have been written by a job of the same id, of another Slurm
    if record and record.job_id == job.job_id and record.started >= job.submitted:
        begun = unix_time(record.started)
        work = (begun, begun + record.seconds)
    ended = _modified(journal.paths.exit_marker(job.stage, job.job_id))
    return JobTimes(
        stage=job.stage,
        needs=journal.plan[job.stage].needs,
        submitted=submitted,
        started=started if started is None else max(started, submitted),
        ended=replaced if ended is None or ended < submitted else ended,
        work=work,
        attempts=_attempts(journal.paths, job, record, metrics) if job.stage == "train" else (),
    )


def resumed_from(facts: Mapping[str, Any]) -> list[int]:
    """The steps that a training resumed from, by the facts of its record."""
    found = facts.get("resumed_from")
    return [step for step in found if isinstance(step, int)] if isinstance(found, list) else []


def _attempts(
    paths: RunPaths, job: Job, record: Record | None, metrics: Mapping[str, Sequence[float | None]]
) -> tuple[AttemptTimes, ...]:
    known = [attempt for attempt in usage.read(paths) if attempt.job_id == job.job_id]
    history = [
        (unix_time(ended.time), ended) for ended in attempts.history(paths, "train") if ended.job_id == job.job_id
    ]
    rows = list(zip(metrics.get("time", ()), metrics.get("seconds_per_step", ()), strict=False))
    found = []
    for number, attempt in enumerate(known):
        started = unix_time(attempt.started)
        ended = started + attempt.seconds
        next_start = unix_time(known[number + 1].started) if number + 1 < len(known) else float("inf")
        lost, reason = 0, ""
        if match := next((one for one in history if started <= one[0] <= next_start), None):
            ended, restart = match
            began = restart.next_began(resumed_from(record.facts) if record else ())
            lost, reason = max(0, restart.step - began), restart.reason
        of_attempt = [
            (written, pace or 0.0) for written, pace in rows if written is not None and started <= written <= ended + 1
        ]
        if metrics and "time" not in metrics and not reason:  # written by an earlier version
            of_attempt = [(started, 0.0), (ended, 0.0)]
        found.append(
            AttemptTimes(
                started=started,
                ended=min(ended, next_start),
                first_step=max(started, of_attempt[0][0] - of_attempt[0][1]) if of_attempt else None,
                last_step=min(of_attempt[-1][0], ended) if of_attempt else None,
                lost_steps=lost,
                reason=reason,
            )
        )
    return tuple(found)


def _started(journal: Journal, job: Job) -> float | None:
    """When the job's script first ran, as its log says."""
    log = journal.log_here(job.stage, job.job_id)
    if log is None:
        return None
    with log.open("rb") as stream:
        head = stream.read(_HEAD_BYTES).decode("utf-8", "replace")
    line = re.search(rf"^{re.escape(banner(job.stage, job.job_id))} on \S+, ({ISO_UTC_PATTERN})$", head, re.MULTILINE)
    return unix_time(line[1]) if line else None


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
