"""What is missing from a run's chain when some of its stages have jobs already, of the run or of its neighbours."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hyperpod_ft.launch.protocol import JobOfRun
from hyperpod_ft.planning.plan import StagePlan
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.run import Run


@dataclass(frozen=True)
class Neighbours:
    """Jobs of other runs that a run's jobs wait for."""

    # by the path of its record: the job that is about to do a stage that runs share
    doing: Mapping[Path, JobOfRun] = field(default_factory=dict)
    # of those, the stages whose job replaces one that failed: what was submitted before it can never start
    replaced: Collection[Path] = ()
    # must have ended, in whatever way, before a stage that starts ranks begins
    before_ranks: Sequence[JobOfRun] = ()


@dataclass(frozen=True)
class ChainParts:
    """The stages that must run, by who does them."""

    missing: tuple[StagePlan, ...]  # no job is about to do them
    doing: Mapping[str, JobOfRun]  # by stage
    never_start: tuple[Job, ...]  # of the run: they wait for a job that has failed


def divide(
    run: Run, stages: Sequence[StagePlan], active: Sequence[Job], pending: Sequence[Job], neighbours: Neighbours
) -> ChainParts:
    """Divide `stages`, which must run, in the plan's order. `active`: the run's jobs; `pending`: those not started."""
    own = {job.stage: job for job in active}
    missing: list[StagePlan] = []
    doing: dict[str, JobOfRun] = {}
    never_start: list[Job] = []
    replaced: set[str] = set()
    for stage in stages:
        job = own.get(stage.name)
        if job and not (job in pending and replaced.intersection(stage.needs)):
            doing[stage.name] = JobOfRun(run, job)
            continue
        if job:
            never_start.append(job)
        path = run.record_path(stage.name)
        elsewhere = neighbours.doing.get(path) if stage.shared else None
        if elsewhere and elsewhere.job != job:
            doing[stage.name] = elsewhere
        else:
            missing.append(stage)
        if stage in missing or path in neighbours.replaced:
            replaced.add(stage.name)
    return ChainParts(tuple(missing), doing, tuple(never_start))
