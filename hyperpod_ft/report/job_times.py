"""When the jobs of a run waited, started, worked and ended, from the files that they left."""

from collections.abc import Mapping, Sequence
from typing import Any

from hyperpod_ft.report.timeline import AttemptTimes, JobTimes
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.journal import Journal
from hyperpod_ft.runs.records import Record, unix_time
from hyperpod_ft.runs.results import holdings
from hyperpod_ft.runs.run_paths import RunPaths


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
    started = holdings.started(journal, job)
    work = None
    # earlier records may have been written by a job of the same id, of another Slurm
    if record and record.job_id == job.job_id and record.started >= job.submitted:
        begun = unix_time(record.started)
        work = (begun, begun + record.seconds)
    return JobTimes(
        stage=job.stage,
        needs=journal.plan[job.stage].needs,
        submitted=submitted,
        started=started if started is None else max(started, submitted),
        ended=holdings.ended(journal, job) or replaced,
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
    known = [(attempt, restart) for attempt, restart in holdings.attempts_of(paths) if attempt.job_id == job.job_id]
    rows = list(zip(metrics.get("time", ()), metrics.get("seconds_per_step", ()), strict=False))
    found = []
    for number, (attempt, restart) in enumerate(known):
        started = unix_time(attempt.started)
        ended = started + attempt.seconds
        next_start = unix_time(known[number + 1][0].started) if number + 1 < len(known) else float("inf")
        lost, reason = 0, ""
        if restart:
            ended = unix_time(restart.time)
            began = restart.next_began(resumed_from(record.facts) if record else ())
            lost, reason = max(0, restart.step - began), restart.reason
        of_attempt = [
            (written, pace or 0.0) for written, pace in rows if written is not None and started <= written <= ended + 1
        ]
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
