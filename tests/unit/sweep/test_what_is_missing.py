"""What a sweep submits when some of its stages have jobs already, of this point or of another, and what for."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest

from hyperpod_ft.launch.interface import After, JobState
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.process.launcher import ProcessLauncher
from hyperpod_ft.launch.submit import create_run_directory
from hyperpod_ft.planning.plan import StagePlan
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sweep.planning import PlannedSweep
from hyperpod_ft.sweep.submission import submit_sweep
from hyperpod_ft.sweep.sweep import Point, Sweep
from tests.conftest import MakeRun
from tests.unit.stage_runs import finish


@dataclass(frozen=True)
class Queue(ProcessLauncher):
    """Starts nothing: every job waits, but those that run. A job is named after its run and its stage."""

    running: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    cancelled: list[str] = field(default_factory=list)
    waits_for: dict[str, list[str]] = field(default_factory=dict)

    def submit(self, run: Run, stages: Sequence[StagePlan], after: After) -> None:
        for stage in stages:
            others = [f"{'' if other.must_succeed else 'end of '}{other.job_id}" for other in after.get(stage.name, ())]
            self.waits_for[self.add(run, stage.name)] = others

    def add(self, run: Run, stage: str) -> str:
        earlier = sum(job.stage == stage for job in run.journal.jobs())
        run.journal.add_job(Job(stage, f"{run.config.name}-{stage}{'-again' * earlier}", self.name, utc_now()))
        return run.journal.jobs()[-1].job_id

    def states(self, run: Run, jobs: Sequence[Job]) -> dict[Job, JobState]:
        known = [job for job in jobs if job.job_id not in self.ended]
        return {job: JobState("RUNNING" if job.job_id in self.running else "PENDING") for job in known}

    def cancel(self, run: Run, jobs: Sequence[Job]) -> None:
        self.cancelled.extend(job.job_id for job in jobs)
        self.ended.update(job.job_id for job in jobs)


@pytest.fixture
def queue() -> Queue:
    return Queue()


def points(make_run: MakeRun, count: int) -> list[Run]:
    """They share what comes before the training."""
    runs = [make_run(name=f"p{number}", training__learning_rate=1 / number) for number in range(1, count + 1)]
    for run in runs:
        create_run_directory(run)
    return runs


def submitted(queue: Queue, runs: Sequence[Run], at_a_time: int | None = None) -> list[list[str]]:
    """The jobs that are submitted for each point."""
    known = tuple(Point({}, run.paths.full_name, "") for run in runs)
    sweep = PlannedSweep(Sweep(runs[0].paths.root, "sweep", at_a_time, "process", known), tuple(runs))
    return [[job.job_id for job in done.jobs] for done in submit_sweep(sweep, Launchers((queue,)))]


def add(queue: Queue, run: Run, stages: Iterable[str]) -> None:
    for stage in stages:
        queue.add(run, stage)


AFTER = ("train", "consolidate", "merge", "generate")


def test_a_chain_that_was_cut_short_is_completed(make_run: MakeRun, queue: Queue) -> None:
    (run,) = points(make_run, 1)
    add(queue, run, ("env", "download"))
    assert submitted(queue, [run]) == [[f"p1-{stage}" for stage in ("certify", "dataset", *AFTER)]]
    assert queue.waits_for["p1-dataset"] == ["p1-env", "p1-download"]
    assert queue.waits_for["p1-merge"] == ["p1-env", "p1-download"], "the others are in the same chain"
    assert queue.cancelled == []


def test_jobs_that_wait_for_a_stage_that_must_run_again_are_replaced_unless_they_run(
    make_run: MakeRun, queue: Queue
) -> None:
    (run,) = points(make_run, 1)
    finish(run, "env")
    add(queue, run, ("dataset", "train", "merge"))
    queue.running.add("p1-dataset")
    ((*new,),) = submitted(queue, [run])
    assert queue.cancelled == ["p1-train", "p1-merge"]
    assert new == [*("p1-download", "p1-certify", "p1-train-again", "p1-consolidate", "p1-merge-again", "p1-generate")]
    assert queue.waits_for["p1-train-again"] == ["p1-dataset"]


def test_what_points_share_is_done_by_one_of_them(make_run: MakeRun, queue: Queue) -> None:
    runs = points(make_run, 2)
    first, second = submitted(queue, runs)
    assert first == [f"p1-{stage.name}" for stage in runs[0].plan.stages]
    assert second == [f"p2-{stage}" for stage in AFTER]
    assert queue.waits_for["p2-train"] == ["p1-env", "p1-download", "p1-certify", "p1-dataset"]
    assert submitted(queue, runs) == [[], []]

    queue.ended.add("p1-dataset")  # it has failed, and nothing has cancelled yet what waits for it
    replaced = [f"p1-{stage}-again" for stage in ("dataset", *AFTER)], [f"p2-{stage}-again" for stage in AFTER]
    assert submitted(queue, runs) == list(replaced)
    assert sorted(queue.cancelled) == sorted([*first[4:], *second])
    assert queue.waits_for["p2-train-again"] == ["p1-env", "p1-download", "p1-certify", "p1-dataset-again"]


def test_a_training_waits_for_the_end_of_all_before_it_in_its_lane(make_run: MakeRun, queue: Queue) -> None:
    """The last one alone may be cancelled while the one before it trains."""
    runs = points(make_run, 5)
    for stage in ("env", "download", "certify", "dataset"):
        finish(runs[0], stage)
    submitted(queue, runs[:3], at_a_time=2)
    waits_for = [[], [], ["end of p1-train"]]
    assert [queue.waits_for[f"p{number}-train"] for number in (1, 2, 3)] == waits_for
    # later, with more points: the lanes are those of the first submission
    submitted(queue, runs, at_a_time=2)
    assert queue.waits_for["p4-train"] == ["end of p2-train"]
    assert queue.waits_for["p5-train"] == ["end of p1-train", "end of p3-train"]
