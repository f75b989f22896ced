"""How many optimizer steps a run takes."""

from dataclasses import dataclass

from hyperpod_ft.planning.training_steps import rows_per_step, total_steps
from hyperpod_ft.runs.run import Run


@dataclass(frozen=True)
class Steps:
    """Optimizer steps in one pass over the training rows, and in the whole run."""

    per_epoch: float
    total: int


def steps(run: Run) -> Steps | None:
    """How many optimizer steps the run takes; None until its dataset is prepared, or if its record is damaged."""
    record = run.journal.record("dataset")
    if record is None or run.journal.why_not_done("dataset"):
        return None
    training, rows = run.config.training, record.facts.get("train_rows")
    if not isinstance(rows, int):
        return None
    per_step = rows_per_step(training, run.plan.degrees.data_parallel)
    return Steps(rows / per_step, total_steps(training, rows, per_step))
