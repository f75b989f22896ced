"""The timeline of a run: what each of its jobs waited for and did, from times in the run's files."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hyperpod_ft.report.run_report import Activity, TimelineSpan


@dataclass(frozen=True)
class AttemptTimes:
    """One start of the ranks of stage train. Unix times; rows of steps that were lost to a restart are not there."""

    started: float
    ended: float
    first_step: float | None  # when the first step that counts began
    last_step: float | None  # when the last one ended
    lost_steps: int = 0
    reason: str = ""  # why it ended, if another followed


@dataclass(frozen=True)
class JobTimes:
    """One job of one stage. Unix times, seconds; None: not yet, or not known."""

    stage: str
    needs: tuple[str, ...]
    submitted: float
    started: float | None  # its script
    ended: float | None
    work: tuple[float, float] | None  # of the stage program, once it is done
    attempts: tuple[AttemptTimes, ...] = ()  # of stage train


def timeline(jobs: Sequence[JobTimes], now: float | None) -> list[TimelineSpan]:
    """The spans of all jobs in the order given, in seconds since the first submission.

    What has no end yet ends `now`; for a run that is not at work (None), at the last time known.
    """
    if not jobs:
        return []
    begun = min(job.submitted for job in jobs)
    if now is None:
        now = max(max(job.submitted, job.started or 0.0, job.ended or 0.0, *(job.work or ())) for job in jobs)
    ends: dict[str, float] = {}
    spans = []
    for job in jobs:
        for activity, start, end, why in _spans(job, ends, now):
            if end > start:
                spans.append(TimelineSpan(job.stage, activity, round(start - begun, 3), round(end - begun, 3), why))
        ends[job.stage] = job.ended or (job.work[1] if job.work else now)
    return spans


def _spans(job: JobTimes, ends: Mapping[str, float], now: float) -> Iterator[tuple[Activity, float, float, str]]:
    started = job.started if job.started is not None else (job.work[0] if job.work else None)
    needed = {need: ends[need] for need in job.needs if ends.get(need, 0.0) > job.submitted}
    last = max(needed, key=needed.__getitem__, default="")
    until = started if started is not None else (job.ended or now)
    ready = min(max(job.submitted, needed.get(last, 0.0)), until)
    yield "waiting", job.submitted, ready, f"waits for stage {last}"
    yield "waiting", ready, until, "waits for a node"
    if started is None:
        return
    ended = job.ended or (job.work[1] if job.work else now)
    if job.attempts:
        at_work = job.ended is None and job.work is None
        yield from _training(job.attempts, started, ended, at_work)
        return
    if job.work is None:
        if job.stage == "train":
            yield "starting", started, ended, "checks the nodes and starts the ranks"
        else:
            yield "working", started, ended, "works"
        return
    begins, ends_work = max(started, job.work[0]), job.work[1]
    yield "starting", started, begins, "starts its program"
    yield "working", begins, ends_work, "works"
    yield "ending", ends_work, ended, "ends its program"


def _training(
    attempts: Sequence[AttemptTimes], started: float, ended: float, at_work: bool
) -> Iterator[tuple[Activity, float, float, str]]:
    """`at_work`: the job has not ended, so that neither has its last attempt if it ended for no known reason."""
    position, why = started, "checks the nodes and starts the ranks"
    before: Activity = "starting"
    for number, attempt in enumerate(attempts, 1):
        of = f"attempt {number}: " if len(attempts) > 1 else ""
        yield before, position, attempt.started, why
        if at_work and number == len(attempts) and not attempt.reason:
            first = ended if attempt.first_step is None else attempt.first_step
            yield "starting", attempt.started, first, f"{of}loads model and data"
            yield "training", first, ended, f"{of}trains"
            return
        if attempt.first_step is None or attempt.last_step is None:
            lost = f"{attempt.lost_steps:,} steps lost" if attempt.lost_steps else "no step saved"
            yield "lost", attempt.started, attempt.ended, f"{of}{lost}: {attempt.reason or 'not finished'}"
        else:
            yield "starting", attempt.started, attempt.first_step, f"{of}loads model and data"
            yield "training", attempt.first_step, attempt.last_step, f"{of}trains"
            rest: Activity = "lost" if attempt.lost_steps else "ending"
            text = (
                f"{attempt.lost_steps} steps to be trained again: {attempt.reason}"
                if attempt.lost_steps
                else f"saves and ends{f': {attempt.reason}' if attempt.reason else ''}"
            )
            yield rest, attempt.last_step, attempt.ended, f"{of}{text}"
        position, before, why = attempt.ended, "restarting", f"starts the ranks again ({attempt.reason or 'ended'})"
    yield "ending", position, ended, "ends its program"
