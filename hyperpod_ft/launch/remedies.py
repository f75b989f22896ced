"""What a refused command tells the user to run instead."""

from collections.abc import Collection

from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.plan import StagePlan
from hyperpod_ft.runs.journal import Journal
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import Selection, choose

_EVERYTHING = Selection()


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
