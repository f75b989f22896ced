"""What an engine is asked to train."""

from dataclasses import replace

from hyperpod_ft.engines.interface import TrainingTask
from hyperpod_ft.planning.layout import Layout, Sharding
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages.train import plan_layout, training_task


def task_of(run: Run, sharding: Sharding | None = None) -> TrainingTask:
    """As stage train asks it; with another `sharding` if one is given."""
    layout = plan_layout(run)
    return training_task(run, replace(layout, sharding=sharding) if sharding else layout)


def task_without_model(run: Run) -> TrainingTask:
    """For what does not read the base model."""
    return training_task(run, Layout(run.plan.degrees, Sharding("replicated", 1)))
