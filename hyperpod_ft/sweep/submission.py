"""Submit and cancel the runs of a sweep. No process stays: jobs wait for jobs.

With a limit of N runs at a time there are N lanes. The stages of a run that start ranks wait until the training runs
before it in its lane have ended, in whatever way. Each point's lane is written before its jobs are submitted, so that a
sweep that was killed at any line can be submitted again.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch import submit
from hyperpod_ft.launch.decision import TrainsAgainError
from hyperpod_ft.launch.interface import Dependency, JobState
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.journal import Journal
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
    refused: str = ""  # why it was skipped: its training's outputs were deleted


def submit_sweep(planned: PlannedSweep, launchers: Launchers) -> Iterator[SubmittedPoint]:
    """Submit the points that are not done and not at work, one after the other; yields what was done for each.

    Raises UserError when a launcher refuses a job, and for runs at work that an earlier version of the sweep had.
    """
    sweep = planned.sweep
    if not launchers.named(sweep.launcher).shares_volume:
        raise UserError(
            f"sweep {sweep.name}: launcher {sweep.launcher}: its jobs cannot wait for those of another run",
            "submit the points one by one: see `hyperpod-ft sweep plan`, and docs/stages.md",
        )
    with publish.lock(sweep.lock_path, waiting=_WAITING):
        sweep = _with_lanes_kept(sweep, launchers)
        for run in planned.runs:
            submit.create_run_directory(run)
        sweep.write()
        yield from _SweepSubmission(sweep, planned.runs, launchers).points()


def resume_sweep(sweep: Sweep, launchers: Launchers) -> Iterator[SubmittedPoint]:
    """Submit what is left of a sweep, with the run files that its runs were submitted with."""
    runs = tuple(sweep.open_run(point) for point in sweep.points)
    yield from submit_sweep(PlannedSweep(sweep, runs), launchers)


def cancel_sweep(sweep: Sweep, launchers: Launchers) -> Iterator[tuple[Run, tuple[Job, ...]]]:
    """Cancel the jobs of all runs, the last one first: a run must not start because the one before it was cancelled."""
    with publish.lock(sweep.lock_path, waiting=_WAITING):
        for point in reversed(sweep.points):
            run = sweep.open_run(point)
            if jobs := submit.cancel(run, launchers):
                yield run, jobs


def _with_lanes_kept(sweep: Sweep, launchers: Launchers) -> Sweep:
    """The sweep with the lanes of an earlier submission."""
    if not sweep.path.exists():
        return sweep
    earlier = Sweep.open(sweep.directory)
    listed = {point.run for point in sweep.points}
    for point in earlier.points:
        run = None if point.run in listed else earlier.open_if_intact(point)
        if run and launchers.active(run):
            raise UserError(
                f"sweep {sweep.name}: {point.run} is at work, and no longer in the file",
                f"run hyperpod-ft cancel {run.paths.directory}, or give the sweep another name",
            )
    lanes = {point.run: point.lane for point in earlier.points}
    return replace(sweep, points=tuple(replace(point, lane=lanes.get(point.run)) for point in sweep.points))


class _SweepSubmission:
    """What is known while the points of a sweep are submitted one after the other."""

    def __init__(self, sweep: Sweep, runs: tuple[Run, ...], launchers: Launchers) -> None:
        self.sweep, self.runs, self.launchers = sweep, runs, launchers
        self.doing: dict[Path, Dependency] = {}  # shared stages, by the path of their record
        self.training: dict[int, Dependency] = {}  # by number of the point, the job that trains or will
        for number, active in enumerate(_that_can_start(runs, launchers, sweep.launcher)):
            self._note(number, active)

    def points(self) -> Iterator[SubmittedPoint]:
        for number, run in enumerate(self.runs):
            before = self._enter_lane(number)
            try:
                jobs = submit.submit_missing(run, self.launchers, self.sweep.launcher, self._doing_of(run), before)
            except TrainsAgainError as error:
                yield SubmittedPoint(number + 1, run, (), done=False, refused=str(error))
                continue
            if jobs:
                publish.write_text(run.paths.origin, self.sweep.points[number].origin)
            self._note(number, jobs)
            yield SubmittedPoint(number + 1, run, jobs, done=not jobs and not choose(run))

    def _note(self, number: int, jobs: Iterable[Job]) -> None:
        run = self.runs[number]
        for job in jobs:
            if run.plan[job.stage].shared:
                self.doing[run.paths.record_path(job.stage)] = Dependency(str(run.paths.directory), job.job_id)
            if job.stage == "train":
                self.training[number] = Dependency(str(run.paths.directory), job.job_id, must_succeed=False)

    def _doing_of(self, run: Run) -> dict[str, Dependency]:
        """By stage, the jobs of other runs that are about to do what this run shares with them."""
        known = {stage.name: self.doing.get(run.paths.record_path(stage.name)) for stage in run.plan.stages}
        return {name: job for name, job in known.items() if job and job.directory != str(run.paths.directory)}

    def _enter_lane(self, number: int) -> list[Dependency]:
        """The training runs that must end before this point's may begin; writes the point's lane.

        All of the lane, not only the last one: that may be cancelled while one before it trains.
        """
        limit = self.sweep.runs_at_a_time
        if limit is None or number in self.training:
            return []
        lanes: list[list[Dependency]] = [[] for _ in range(limit)]
        for other, job in self.training.items():
            lanes[(self.sweep.points[other].lane or 0) % limit].append(job)
        lane = min(range(limit), key=lambda one: len(lanes[one]))
        points = list(self.sweep.points)
        points[number] = replace(points[number], lane=lane)
        self.sweep = replace(self.sweep, points=tuple(points))
        self.sweep.write()
        return lanes[lane]


def _that_can_start(runs: Sequence[Run], launchers: Launchers, launcher: str) -> list[list[Job]]:
    """The jobs at work of each run. Cancels those that can never start, because a job that they wait for has failed."""
    at_work = [_at_work(run, launchers, launcher) for run in runs]
    states = {
        run.paths.record_path(job.stage): state
        for run, of_run in zip(runs, at_work, strict=True)
        for job, state in of_run.items()
    }

    def can_start(journal: Journal, stage: str) -> bool:
        state = states.get(journal.paths.record_path(stage))
        if state is None:
            return journal.is_done(stage)
        return state.state != "PENDING" or all(can_start(journal, need) for need in journal.plan[stage].needs)

    found = []
    for run, of_run in zip(runs, at_work, strict=True):
        left = list(of_run)
        if stuck := [job for job in left if not can_start(run.journal, job.stage)]:
            launchers.cancel(run, stuck)
            # with them, launcher `process` ends the chain that they are in
            left = [job for job in _at_work(run, launchers, launcher) if job not in stuck]
        found.append(left)
    return found


def _at_work(run: Run, launchers: Launchers, launcher: str) -> dict[Job, JobState]:
    """The run's jobs of this launcher whose stages are not done, with their states."""
    at_work = launchers.at_work(run, also=launcher)
    return {job: state for job, state in at_work.items() if job.launcher == launcher}
