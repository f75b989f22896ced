"""All stages of a run as functions: a chain without the seconds that each program takes to import its packages."""

from collections.abc import Callable
from typing import Any

from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import certify, consolidate, dataset, download, generate, merge, reward, stage
from tests.training.conftest import train_here
from tests.unit.stage_runs import finish

_WORKS: dict[str, Any] = {
    "download": download.work,
    "certify": certify.work,
    "dataset": dataset.work,
    "reward": reward.work,
    "consolidate": consolidate.work,
    "merge": merge.work,
    "generate": generate.work,
}


def perform(run: Run, train: Callable[[Run], object] = train_here) -> Run:
    """`train`: what leaves the record of stage train. tests/slurm/test_pipeline.py starts the stages as jobs do."""
    run.freeze()
    finish(run, "env")
    for each in run.plan.stages[1:]:
        if each.name == "train":
            train(run)
        else:
            stage.perform(run, each.name, _WORKS[each.name])
    return run
