"""The command `eval`: benchmarks of a finished run's base and tuned model."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hyperpod_ft.cli.options import RunReference, Watch


def eval_command(
    tasks: Annotated[
        str, typer.Option("--tasks", metavar="NAME,...", help="Tasks or groups of lm-evaluation-harness.")
    ],
    run: RunReference = None,
    num_fewshot: Annotated[
        int | None, typer.Option(metavar="N", help="Solved examples before each question.", show_default="the task's")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Only the first questions of each task.", show_default=False)
    ] = None,
    batch_size: Annotated[str, typer.Option(metavar="N|auto", help="Questions that a model reads at once.")] = "1",
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Write questions with the tuned model's chat template.")
    ] = False,
    include_path: Annotated[
        str | None, typer.Option(metavar="DIR", help="Directory of your own tasks.", show_default=False)
    ] = None,
    allow_code_execution: Annotated[
        bool, typer.Option("--allow-code-execution", help="Allow tasks that run code written by the models.")
    ] = False,
    python: Annotated[
        str | None,
        typer.Option(metavar="PYTHON", help="Interpreter that has lm_eval.", show_default="installed by stage tasks"),
    ] = None,
    launcher: Annotated[
        str | None, typer.Option("--launcher", help="`slurm` or `process`. Default: the one used last.")
    ] = None,
    watch: Watch = False,
) -> None:
    """Evaluate a finished run's base and tuned model with lm-evaluation-harness.

    Submits stages `tasks` and `eval`; the run stays the same. `status` and `compare` show the scores.
    """
    from hyperpod_ft.cli.output import show_runs
    from hyperpod_ft.cli.submitting import submit_and_follow
    from hyperpod_ft.launch.finished import with_evaluation
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.runs import references
    from hyperpod_ft.runs.results.evaluation import evaluations
    from hyperpod_ft.runs.selection import Selection

    section: dict[str, Any] = {
        "tasks": tuple(name.strip() for name in tasks.split(",")),
        "num_fewshot": num_fewshot,
        "limit": limit,
        "batch_size": int(batch_size) if batch_size.isdigit() else batch_size,
        "apply_chat_template": apply_chat_template,
        "include_path": include_path,
        "allow_code_execution": allow_code_execution,
        "python": python,
    }
    evaluated = with_evaluation(references.find(run), section, Path.cwd())
    if evaluated.journal.is_done("eval"):
        show_runs.scores(evaluations(evaluated))
    chosen = launcher or evaluated.journal.last_launcher
    submit_and_follow(evaluated, Launchers(), chosen, Selection(only="eval"), watch=watch)
