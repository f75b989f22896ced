"""The same run elsewhere: on another number of nodes, another instance type, with other degrees of parallelism."""

import shlex
from collections.abc import Sequence

from hyperpod_ft.config import run_file
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.submit import refuse_other_version
from hyperpod_ft.planning.engine_rules import rules_of
from hyperpod_ft.planning.parallelism import keeping_rows
from hyperpod_ft.runs.run import Run

_SECTIONS = ("cluster", "parallelism", "training", "sagemaker")
_OF_A_STEP = ("training.micro_batch_size", "training.gradient_accumulation_steps")


def elsewhere(run: Run, overrides: Sequence[str]) -> Run:
    """The run with other values of its run file (`cluster.nodes=3`), in its directory; nothing is written.

    A step keeps its rows: `keeping_rows` chooses the forward passes. Raises UserError when that is not possible, or
    when these values make it another run.
    """
    refuse_other_version(run)
    asked = run_file.overridden(run.config, overrides)
    before = run.config.by_key()
    changed = [key for key, value in asked.by_key().items() if value != before.get(key)]
    arguments = [str(run.paths.config_path), *(f"--set={override}" for override in overrides)]
    again = run.journal.submit_command(shlex.join(arguments))
    if others := [key for key in changed if key.partition(".")[0] not in _SECTIONS]:
        raise UserError(f"--set {others[0]}: resume sets only keys of {', '.join(_SECTIONS)}", f"run: {again}")
    if asked.parallelism.degrees == "auto":
        asked = Run.of(asked).config
    rows = run.config.rows_per_step(run.plan.degrees.data_parallel)
    moved = Run.of(keeping_rows(asked, rows))
    given, found = asked.by_key(), moved.config.by_key()
    for key in _OF_A_STEP:
        if found[key] != given[key] and any(override.startswith(f"{key}=") for override in overrides):
            raise UserError(
                f"--set {key}: {given[key]} does not keep {rows} rows a step on"
                f" {moved.plan.degrees.data_parallel} data-parallel ranks",
                f"leave it out; {found[key]} would",
            )
    if moved.paths.directory != run.paths.directory:
        bound = "" if rules_of(run.config.engine).continues_elsewhere(run.config) else " (docs/reliability.md says why)"
        raise UserError(
            f"--set {', '.join(changed)}: this training cannot continue so{bound}", f"start another run: {again}"
        )
    return moved
