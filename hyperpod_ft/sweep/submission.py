"""Submit and cancel the runs of a sweep. No process stays: jobs wait for jobs.

With a limit of N runs at a time there are N lanes. The stages of a run that start ranks wait until the training runs
before it in its lane have ended, in whatever way. Each point's lane is written before its jobs are submitted, so that a
sweep that was killed at any line can be submitted again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch import submit
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.protocol import AwaitedJobs, JobOfRun
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import choose
from hyperpod_ft.sweep.planning import PlannedSweep
from hyperpod_ft.sweep.sweep import Sweep

_WAITING = "waiting for another command on this sweep"


@dataclass(frozen=True)
class SubmittedPoint:
    """What a submission did for one point."""

    number: int  # from 1
    run: Run
    jobs: tuple[Job, ...]  # that were submitted now
    done: bool  # all its stages


def submit_sweep(planned: PlannedSweep) -> Iterator[SubmittedPoint]:
    """Submit the points that are not done and not at work, one after the other; yields what was done for each.

    Raises UserError when a launcher refuses a job, and for runs at work that an earlier version of the sweep had.
    """
    sweep = planned.sweep
    if not Launchers().named(sweep.launcher).can_wait_for_other_runs:
        raise UserError(
            f"sweep {sweep.name}: launcher {sweep.launcher}: its jobs cannot wait for those of another run",
            "submit the points one by one: see `hyperpod-ft sweep plan`, and docs/sweeps.md",
        )
    with publish.lock(sweep.lock_path, waiting=_WAITING):
        sweep = _with_lanes_kept(sweep)
        for run in planned.runs:
            submit.create_run_directory(run)
        sweep.write()
        yield from _SweepSubmission(sweep, planned.runs).points()


def resume_sweep(sweep: Sweep) -> Iterator[SubmittedPoint]:
    """Submit what is left of a sweep, with the run files that its runs were submitted with."""
    runs = tuple(sweep.open_run(point) for point in sweep.points)
    yield from submit_sweep(PlannedSweep(sweep, runs))


def cancel_sweep(sweep: Sweep) -> Iterator[tuple[Run, tuple[Job, ...]]]:
    """Cancel the jobs of all runs, the last one first: a run must not start because the one before it was cancelled."""
    with publish.lock(sweep.lock_path, waiting=_WAITING):
        for point in reversed(sweep.points):
            run = sweep.open_run(point)
            if jobs := submit.cancel(run, Launchers.of(run)):
                yield run, jobs


def _with_lanes_kept(sweep: Sweep) -> Sweep:
    """The sweep with the lanes of an earlier submission."""
    if not sweep.path.exists():
        return sweep
    earlier = Sweep.open(sweep.directory)
    listed = {point.run for point in sweep.points}
    for point in earlier.points:
        run = None if point.run in listed else earlier.open_if_intact(point)
        if run and Launchers.of(run).active(run):
            raise UserError(
                f"sweep {sweep.name}: {point.run} is at work, and no longer in the file",
                f"run hyperpod-ft cancel {run.directory}, or give the sweep another name",
            )
    lanes = {point.run: point.lane for point in earlier.points}
    for number, point in enumerate(sweep.points):
        if (lane := lanes.get(point.run)) is not None:
            sweep = sweep.with_lane(number, lane)
    return sweep


class _SweepSubmission:
    """What is known while the points of a sweep are submitted one after the other."""

    def __init__(self, sweep: Sweep, runs: tuple[Run, ...]) -> None:
        self.sweep, self.runs = sweep, runs
        self.doing: dict[Path, JobOfRun] = {}  # shared stages, by the path of their record
        self.training: dict[int, JobOfRun] = {}  # by number of the point, the job that trains or will
        for number, run in enumerate(runs):
            active = Launchers.of(run).at_work(run, also=sweep.launcher)
            self._note(number, [job for job in active if job.launcher == sweep.launcher])

    def points(self) -> Iterator[SubmittedPoint]:
        for number, run in enumerate(self.runs):
            before = self._enter_lane(number)
            awaited = AwaitedJobs(self._doing_of(run), before)
            launchers = Launchers.of(run)
            jobs = submit.submit_missing(run, launchers, self.sweep.launcher, awaited)
            if jobs:
                publish.write_text(run.origin, self.sweep.points[number].origin)
            self._note(number, jobs, just_submitted=True)
            yield SubmittedPoint(number + 1, run, jobs, done=not jobs and not choose(run))

    def _note(self, number: int, jobs: Sequence[Job], *, just_submitted: bool = False) -> None:
        run = self.runs[number]
        for job in jobs:
            known = JobOfRun(run, job, just_submitted)
            if run.plan[job.stage].shared:
                self.doing[run.record_path(job.stage)] = known
            if job.stage == "train":
                self.training[number] = known

    def _doing_of(self, run: Run) -> dict[str, JobOfRun]:
        """By stage, the jobs of other runs that are about to do what this run shares with them."""
        known = {stage.name: self.doing.get(run.record_path(stage.name)) for stage in run.plan.stages}
        return {name: job for name, job in known.items() if job and job.run is not run}

    def _enter_lane(self, number: int) -> list[JobOfRun]:
        """The training runs that must end before this point's may begin; writes the point's lane."""
        limit = self.sweep.runs_at_a_time
        if limit is None or number in self.training:
            return []
        lanes: list[list[JobOfRun]] = [[] for _ in range(limit)]
        for other, job in self.training.items():
            lanes[(self.sweep.points[other].lane or 0) % limit].append(job)
        lane = min(range(limit), key=lambda one: len(lanes[one]))
        self.sweep = self.sweep.with_lane(number, lane)
        self.sweep.write()
        return lanes[lane]
