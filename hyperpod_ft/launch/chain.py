"""What is missing from a run's chain when some of its stages have jobs already, of this run or of another."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hyperpod_ft.launch.protocol import AwaitedJobs, JobOfRun
from hyperpod_ft.planning.plan import StagePlan
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.run import Run


@dataclass(frozen=True)
class ChainParts:
    """The stages that must run, by who does them."""

    missing: tuple[StagePlan, ...]  # no job is about to do them
    awaited: AwaitedJobs  # its `doing` has the other stages
    never_start: tuple[Job, ...]  # of the run: they wait for a job that has failed


def divide(
    run: Run, stages: Sequence[StagePlan], active: Sequence[Job], pending: Sequence[Job], awaited: AwaitedJobs
) -> ChainParts:
    """Divide `stages`, which must run, in the plan's order.

    `active`: the run's jobs; `pending`: those not started; `awaited`: the jobs of other runs.
    """
    own = {job.stage: job for job in active}
    missing: list[StagePlan] = []
    doing: dict[str, JobOfRun] = {}
    never_start: list[Job] = []
    replaced: set[str] = set()  # the jobs that pending ones wait for have failed
    for stage in stages:
        job = own.get(stage.name)
        if job and not (job in pending and replaced.intersection(stage.needs)):
            doing[stage.name] = JobOfRun(run, job)
            continue
        if job:
            never_start.append(job)
        other = awaited.doing.get(stage.name)
        if other:
            doing[stage.name] = other
        else:
            missing.append(stage)
        if stage in missing or doing[stage.name].just_submitted:
            replaced.add(stage.name)
    return ChainParts(tuple(missing), replace(awaited, doing=doing), tuple(never_start))
