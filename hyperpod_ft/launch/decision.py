"""What a submission does, decided from a run's records and from what jobs are about to do. Nothing is written here."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.interface import After, Dependency
from hyperpod_ft.planning.plan import StagePlan
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import RunPaths
from hyperpod_ft.runs.selection import Selection, choose

_EVERYTHING = Selection()
_NOTHING: Mapping[str, Dependency] = {}


class TrainsAgainError(UserError):
    """A finished training would be repeated, because something needs outputs of it that are gone: days of work."""


@dataclass(frozen=True)
class DecidedSubmission:
    """What a submission does, unless it is refused."""

    stages: tuple[StagePlan, ...]  # those to submit, in order
    after: After
    refused: TrainsAgainError | None
    forgotten: tuple[Path, ...]  # records that are removed, since they mark these stages as done
    set_aside: tuple[Path, ...]  # results that are kept under another name: these stages must not continue from them
    forces_evaluation: bool  # runs share the base model's scores: only the stage knows the conditions of its own


def decide(
    run: Run,
    selection: Selection = _EVERYTHING,
    doing: Mapping[str, Dependency] = _NOTHING,
    before_ranks: Sequence[Dependency] = (),
) -> DecidedSubmission:
    """What is submitted of a run now.

    `doing`: by stage, jobs that are about to do it; `before_ranks`: what must have ended before ranks start.
    Raises UserError for an unknown stage, or when a stage that was not selected is needed.
    """
    must_run = choose(run, selection)
    undone = {stage.name for stage in must_run}
    stages = tuple(stage for stage in must_run if stage.name not in doing)
    names = [stage.name for stage in stages]
    after = {
        stage.name: (
            *(doing[need] for need in stage.needs if need in undone and need in doing),
            *(before_ranks if stage.starts_ranks else ()),
        )
        for stage in stages
    }
    # of a training whose outputs are gone, so that `resume` can continue the new one after it is cancelled
    outdated = ["train"] if "train" in names and run.journal.why_not_done("train") else []
    return DecidedSubmission(
        stages=stages,
        after={name: awaited for name, awaited in after.items() if awaited},
        refused=_training_again(run, selection, must_run) if "train" in names else None,
        forgotten=tuple(run.paths.record_path(name) for name in (names if selection.force else outdated)),
        set_aside=_results(run.paths, names) if selection.force else (),
        forces_evaluation=selection.force and "eval" in names,
    )


def _training_again(run: Run, selection: Selection, must_run: Sequence[StagePlan]) -> TrainsAgainError | None:
    """The refusal to train again, unless that was asked for.

    `--from` an earlier stage asks for it too: what the training itself needs may be gone as well.
    """
    if run.journal.valid_record("train") is None or selection.force or selection.only == "train":
        return None
    if selection.start and run.plan["train"] in run.plan.following(selection.start):
        return None
    needy = next(stage.name for stage in must_run if "train" in stage.needs)
    reason, gone = run.journal.why_not_done(needy), run.journal.why_not_done("train")
    if not (reason and gone):  # it has ended since
        return None
    again = run.journal.submit_command(f"{run.paths.config_path} --from {must_run[0].name}")
    return TrainsAgainError(
        f"{run.paths.directory}: stage {needy}: {reason}; the training outputs that it needs are missing: {gone}",
        f"restore it, or train again: {again}",
    )


def _results(paths: RunPaths, stages: Collection[str]) -> tuple[Path, ...]:
    """What a forced training must not resume from, nor a forced evaluation."""
    of_training = (
        paths.checkpoints,
        paths.metrics_path,
        paths.usage_path,
        paths.slowest_ranks,
        paths.restarts_path("train"),
        paths.reference_log_probabilities,
        paths.tracking,  # in trackers, it is another run
    )
    return (*(of_training if "train" in stages else ()), *((paths.tuned_scores,) if "eval" in stages else ()))
