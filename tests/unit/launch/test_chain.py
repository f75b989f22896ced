"""Which stages of a run are missing, when some have jobs already."""

from collections.abc import Callable

from hyperpod_ft.launch.chain import ChainParts, Neighbours, divide
from hyperpod_ft.launch.protocol import JobOfRun
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.run import Run

MakeRun = Callable[..., Run]


def job(stage: str, number: int = 1) -> Job:
    return Job(stage, str(number), "slurm", "2026-01-01T00:00:00Z")


def names(division: ChainParts) -> tuple[list[str], list[str], list[str]]:
    return (
        [stage.name for stage in division.missing],
        list(division.doing),
        [stuck.stage for stuck in division.never_start],
    )


def test_a_chain_that_was_cut_short_is_completed(make_run: MakeRun) -> None:
    run = make_run()
    active = [job("env"), job("download")]
    division = divide(run, run.plan.stages[:4], active, active, Neighbours())
    assert names(division) == (["dataset", "train"], ["env", "download"], [])
    assert division.doing["env"] == JobOfRun(run, active[0])


def test_jobs_that_wait_for_a_stage_that_must_run_again_are_replaced_unless_they_run(make_run: MakeRun) -> None:
    run = make_run()
    dataset, train, merge = job("dataset"), job("train"), job("merge")
    stages = [run.plan[name] for name in ("download", "dataset", "train", "consolidate", "merge")]
    division = divide(run, stages, [dataset, train, merge], [train, merge], Neighbours())
    assert names(division) == (
        ["download", "train", "consolidate", "merge"],
        ["dataset"],
        ["train", "merge"],
    ), "dataset runs"


def test_a_neighbour_does_what_runs_share_and_nothing_else(make_run: MakeRun) -> None:
    run, other = make_run(), make_run(seed=43)
    doing = {path: JobOfRun(other, job(name)) for name in ("env", "train") for path in [other.record_path(name)]}
    stages = [run.plan[name] for name in ("env", "dataset", "train")]
    assert names(divide(run, stages, [], [], Neighbours(doing))) == (["dataset", "train"], ["env"], [])
    # the neighbour's job replaces one that failed, which this run's jobs have waited for
    waiting = [job("dataset", 8), job("train", 9)]
    neighbours = Neighbours(doing, replaced=[other.record_path("env")])
    assert names(divide(run, stages, waiting, waiting, neighbours)) == (
        ["dataset", "train"],
        ["env"],
        ["dataset", "train"],
    )
