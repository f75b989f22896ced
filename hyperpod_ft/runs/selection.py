"""Selects the stages of a run that must run, working backwards from its products."""

from dataclasses import dataclass

from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.plan import Plan, StagePlan
from hyperpod_ft.runs.run import Run


@dataclass(frozen=True)
class Selection:
    """The stages a submission may run: all, from one on, or only one; `force` runs them even if they are done."""

    start: str | None = None
    only: str | None = None
    force: bool = False


def choose(run: Run, selection: Selection = Selection()) -> tuple[StagePlan, ...]:
    """The stages that must run, in order. Empty when all are done.

    Starts at a run's products, the final model and what is made of it, and adds what they need. A stage that is done
    needs nothing: checkpoints may be deleted once they are consolidated, an adapter once it is merged. `start` also
    asks for what only later stages would need, such as that adapter.

    Raises UserError for an unknown stage, or when a stage that was not selected is needed.
    """
    for name in (selection.start, selection.only):
        if name is not None:
            run.plan.require(name)
    if selection.start and selection.only:
        raise UserError("--from and --only: cannot be combined", "give one of them")
    selected, targets = _targets(run.plan, selection)
    chosen: set[str] = set()
    while targets:
        name = targets.pop()
        forced = name in selected and (selection.force or (name == "env" and _has_to_install(run)))
        if name in chosen or not (forced or run.journal.why_not_done(name)):
            continue
        if name not in selected:
            raise UserError(
                f"stage {name} is needed and {run.journal.why_not_done(name)}",
                f"submit with --from {name}, or without --from and --only",
            )
        chosen.add(name)
        targets += run.plan[name].needs
    return tuple(stage for stage in run.plan.stages if stage.name in chosen)


def _has_to_install(run: Run) -> bool:
    """Whether trackers lack their packages. In containers of training jobs they have no use."""
    return bool(trackers_to_install(run)) and not run.config.has_other_interpreters


def trackers_to_install(run: Run) -> list[str]:
    """The trackers that lack the environment that stage env makes."""
    if run.config.tracking.python:
        return []
    return [name for name in run.config.tracking.trackers if not run.paths.tracker_python(name).exists()]


def _targets(plan: Plan, selection: Selection) -> tuple[set[str], list[str]]:
    """The stages that may run, and those to start the search at."""
    if selection.only:
        # only evaluations need stage tasks: it is part of them
        return {selection.only, *(["tasks"] if selection.only == "eval" else [])}, [selection.only]
    stages = plan.following(selection.start) if selection.start else plan.stages
    selected: set[str] = {stage.name for stage in stages}
    if selection.force:
        return selected, sorted(selected)
    first = "train" if selection.start else plan.model_stage
    return selected, [stage.name for stage in plan.following(first) if stage.name != "train"]
