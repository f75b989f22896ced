"""The tuned model that a command means: a directory, or that of a run, wherever its jobs have left it."""

from pathlib import Path

from hyperpod_ft.annexes import annexes, bring
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.remedies import require_done
from hyperpod_ft.runs import references
from hyperpod_ft.runs.run import Run

TUNED, BASE = "tuned", "base"  # the names of a run's models where both are asked


def outside_runs(reference: str | None) -> Path | None:
    """The directory that a RUN or DIR argument names; None for a run."""
    if reference is None or not Path(reference).is_dir() or (Path(reference) / "run.yaml").exists():
        return None
    return Path(reference)


def tuned_run(reference: str | None, *, base: bool = False) -> Run:
    """The run of a RUN argument, None being the one submitted last, with its tuned model on this machine.

    `base`: and with base model and adapter. Raises UserError when there is no such run, or no tuned model yet.
    """
    run = references.find(reference)
    if run.journal.why_not_done(run.plan.model_stage):
        Launchers.of(run).bring_files(run)  # training jobs may have made it since the last look
    require_done(run.journal, run.plan.model_stage, "no tuned model yet")
    bring(run, [run.paths.tuned_model, *([run.paths.base_model, run.paths.adapter] if base else [])])
    return run


def directory(reference: str | None) -> Path:
    """The tuned model's directory of a RUN argument, or the DIR itself. Raises UserError as `tuned_run` does."""
    return outside_runs(reference) or tuned_run(reference).paths.tuned_model


def model_location(run: Run) -> str:
    """Where the tuned model is, or will be: a path, or a URL of the store that training jobs left it in."""
    elsewhere = (annex.location(run, run.paths.tuned_model) for annex in annexes())
    return next(filter(None, elsewhere), str(run.paths.tuned_model))
