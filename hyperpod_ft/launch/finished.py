"""What commands need of finished runs: the tuned model, or another evaluation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyperpod_ft.config import run_file
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.planning.plan import Plan, plan
from hyperpod_ft.runs import references
from hyperpod_ft.runs.run import Run

TUNED, BASE = "tuned", "base"  # the names of a run's models where both are asked
_OF_EVALUATION = ("tasks", "eval")


def outside_runs(reference: str | None) -> Path | None:
    """The directory that a RUN or DIR argument names; None for a run."""
    if reference is None or not Path(reference).is_dir() or (Path(reference) / "run.yaml").exists():
        return None
    return Path(reference)


def tuned_run(reference: str | None, launchers: Launchers, *, base: bool = False) -> Run:
    """The run of a RUN argument, None being the one submitted last, with its tuned model on this machine.

    `base`: and with base model and adapter. Raises UserError when there is no such run, or no tuned model yet.
    """
    run = references.find(reference)
    if run.journal.why_not_done(run.plan.model_stage):
        launchers.bring_small_files(run)  # training jobs may have made it since the last look
    run.journal.require_done(run.plan.model_stage, "no tuned model yet")
    launchers.bring_outputs(run, [run.paths.tuned_model, *([run.paths.base_model, run.paths.adapter] if base else [])])
    return run


def tuned_directory(reference: str | None, launchers: Launchers) -> Path:
    """The tuned model's directory of a RUN argument, or the DIR itself. Raises UserError as `tuned_run` does."""
    return outside_runs(reference) or tuned_run(reference, launchers).paths.tuned_model


def with_evaluation(run: Run, section: Mapping[str, Any], base: Path) -> Run:
    """The same run, with the section `eval` that its run file lacks, or another one. Relative paths begin at `base`.

    Raises UserError when the section is wrong, when the run has no final model yet, or when this version of the kit
    would make another one.
    """
    run.journal.require_done(run.plan.model_stage, "no tuned model yet")
    config = run_file.with_evaluation(run.config, section, base)
    evaluated = Run(config, plan(config))
    if _others(run.plan) != _others(evaluated.plan):
        raise UserError(
            f"{run.paths.directory}: was planned by another version of hyperpod-ft",
            "evaluate it with that version",
        )
    return evaluated


def _others(plan: Plan) -> dict[str, str]:
    return {stage.name: stage.fingerprint for stage in plan.stages if stage.name not in _OF_EVALUATION}
