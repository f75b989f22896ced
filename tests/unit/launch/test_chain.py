"""Which stages of a run are missing, when some have jobs already."""

from collections.abc import Callable

from hyperpod_ft.launch.chain import ChainParts, divide
from hyperpod_ft.launch.protocol import NOTHING_ELSE, AwaitedJobs, JobOfRun
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.run import Run

MakeRun = Callable[..., Run]


def job(stage: str, number: int = 1) -> Job:
    return Job(stage, str(number), "slurm", "2026-01-01T00:00:00Z")


def names(division: ChainParts) -> tuple[list[str], list[str], list[str]]:
    return (
        [stage.name for stage in division.missing],
        list(division.awaited.doing),
        [stuck.stage for stuck in division.never_start],
    )


def test_a_chain_that_was_cut_short_is_completed(make_run: MakeRun) -> None:
    run = make_run()
    active = [job("env"), job("download")]
    division = divide(run, run.plan.stages[:4], active, active, NOTHING_ELSE)
    assert names(division) == (["dataset", "train"], ["env", "download"], [])
    assert division.awaited.doing["env"] == JobOfRun(run, active[0])


def test_jobs_that_wait_for_a_stage_that_must_run_again_are_replaced_unless_they_run(make_run: MakeRun) -> None:
    run = make_run()
    dataset, train, merge = job("dataset"), job("train"), job("merge")
    stages = [run.plan[name] for name in ("download", "dataset", "train", "consolidate", "merge")]
    division = divide(run, stages, [dataset, train, merge], [train, merge], NOTHING_ELSE)
    assert names(division) == (
        ["download", "train", "consolidate", "merge"],
        ["dataset"],
        ["train", "merge"],
    ), "dataset runs"


def test_a_job_of_another_run_does_a_stage(make_run: MakeRun) -> None:
    run, other = make_run(), make_run(seed=43)
    before = [JobOfRun(other, job("train", 7))]
    stages = [run.plan[name] for name in ("env", "dataset", "train")]
    earlier = AwaitedJobs({"env": JobOfRun(other, job("env"))}, before)
    alone = divide(run, stages, [], [], earlier)
    assert names(alone) == (["dataset", "train"], ["env"], [])
    assert alone.awaited == earlier
    waiting = [job("dataset", 8), job("train", 9)]
    assert names(divide(run, stages, waiting, waiting, earlier)) == ([], ["env", "dataset", "train"], [])
    # this job replaces one that failed, which this run's jobs have waited for
    replacing = AwaitedJobs({"env": JobOfRun(other, job("env"), just_submitted=True)}, before)
    assert names(divide(run, stages, waiting, waiting, replacing)) == (
        ["dataset", "train"],
        ["env"],
        ["dataset", "train"],
    )
