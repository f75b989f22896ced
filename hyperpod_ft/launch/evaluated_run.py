"""A finished run with an evaluation of its own: the section `eval` that its run file lacks, or another one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyperpod_ft.config import run_file
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.remedies import require_done
from hyperpod_ft.planning.plan import Plan, plan
from hyperpod_ft.runs.run import Run

_STAGES = ("tasks", "eval")


def with_evaluation(run: Run, section: Mapping[str, Any], base: Path) -> Run:
    """The same run, whose plan has the stages `tasks` and `eval` of this section; its relative paths begin at `base`.

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
    return {stage.name: stage.fingerprint for stage in plan.stages if stage.name not in _STAGES}
