"""What commands need of finished runs: the tuned model, or another evaluation; and what they tell the user to run where
a stage is not done, or would train again.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hyperpod_ft.config import run_file
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.planning.plan import Plan, StagePlan, plan
from hyperpod_ft.runs import references
from hyperpod_ft.runs.journal import Journal
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import Selection, choose

TUNED, BASE = "tuned", "base"  # the names of a run's models where both are asked
_EVERYTHING = Selection()
_OF_EVALUATION = ("tasks", "eval")


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
    Launchers().bring(run, [run.paths.tuned_model, *([run.paths.base_model, run.paths.adapter] if base else [])])
    return run


def tuned_directory(reference: str | None) -> Path:
    """The tuned model's directory of a RUN argument, or the DIR itself. Raises UserError as `tuned_run` does."""
    return outside_runs(reference) or tuned_run(reference).paths.tuned_model


class TrainsAgainError(UserError):
    """A finished training would be repeated, because something needs outputs of it that are gone: days of work."""


def submit_command(journal: Journal, arguments: str) -> str:
    """`submit` with these arguments, and with the launcher that the run has used last."""
    launcher = journal.last_launcher
    return f"hyperpod-ft submit {arguments}{'' if launcher == 'slurm' else f' --launcher {launcher}'}"


def require_done(journal: Journal, stage: str, missing: str) -> None:
    """Raise UserError unless the stage is done; `missing`: what there is not without it."""
    if reason := journal.why_not_done(stage):
        directory = journal.paths.directory
        finished = journal.is_done(journal.plan.model_stage)  # there is nothing to resume
        again = submit_command(journal, f"{journal.paths.config_path} --only {stage}")
        command = again if finished else f"hyperpod-ft resume {directory}"
        raise UserError(f"{directory}: {missing}: stage {stage}: {reason}", f"run: {command}")


def training_again(
    run: Run, stages: Collection[StagePlan], selection: Selection = _EVERYTHING
) -> TrainsAgainError | None:
    """The refusal to train again, unless that was asked for. `stages`: those of the selection that would be submitted.

    `--from` an earlier stage asks for it too: what the training itself needs may be gone as well.
    """
    if run.plan["train"] not in stages or run.journal.valid_record("train") is None or selection.force:
        return None
    if selection.only == "train" or (selection.start and run.plan["train"] in run.plan.following(selection.start)):
        return None
    must_run = choose(run, selection)
    if run.plan["train"] not in must_run:  # it has ended since
        return None
    needy = next(stage.name for stage in must_run if "train" in stage.needs)
    gone = f"what it needs of the training is gone: {run.journal.why_not_done('train')}"
    again = submit_command(run.journal, f"{run.paths.config_path} --from {must_run[0].name}")
    return TrainsAgainError(
        f"{run.paths.directory}: stage {needy}: {run.journal.why_not_done(needy)}; {gone}",
        f"restore it, or train again: {again}",
    )


def with_evaluation(run: Run, section: Mapping[str, Any], base: Path) -> Run:
    """The same run, with the section `eval` that its run file lacks, or another one. Relative paths begin at `base`.

    Raises UserError when the section is wrong, when the run has no final model yet, or when this version of the kit
    would make another one.
    """
    require_done(run.journal, run.plan.model_stage, "no tuned model yet")
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
