"""Starts `evaluation/harness.py` with the interpreter that has lm-evaluation-harness, and reads what it leaves."""

import os
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError
from hyperpod_ft.evaluation.harness import ScoresRequest, TasksAnswer, TasksRequest
from hyperpod_ft.runs.results.evaluation import ModelScores
from hyperpod_ft.runs.run_paths import RunPaths
from hyperpod_ft.shipped import importing_the_kit

_PROGRAM = "hyperpod_ft.evaluation.harness"
_PROGRESS_SECONDS = 10


def look_up(paths: RunPaths, request: TasksRequest) -> TasksAnswer:
    """Find an evaluation's tasks, and fetch their datasets. Raises UserError when the harness ends unexpectedly."""
    with tempfile.TemporaryDirectory() as directory:
        answer = Path(directory) / "answer.json"
        _run(paths, "tasks", asdict(request), allow_code=request.allow_code_execution, arguments=[str(answer)])
        return _ANSWER.validate_json(answer.read_bytes())


def scores(paths: RunPaths, request: ScoresRequest) -> ModelScores:
    """One model's scores: those that its file has already, and those that are computed now.

    Raises UserError when a task failed, which the other tasks survive, or when the harness ends unexpectedly.
    """
    known = ModelScores.read(Path(request.scores), request.conditions)
    if done := [task for task in request.tasks if task in known.tasks]:
        print(f"eval: {request.title}: already done: {', '.join(done)}", flush=True)
    if len(done) < len(request.tasks):
        _run(paths, "scores", asdict(request), allow_code=request.allow_code_execution)
        known = ModelScores.read(Path(request.scores), request.conditions)
    failed = [task for task in request.tasks if task not in known.tasks]
    if failed:
        reasons = "; ".join(f"{task}: {known.failed.get(task, 'no result')}" for task in failed)
        raise UserError(
            f"{request.title}: {len(failed)} of {len(request.tasks)} tasks failed: {reasons}",
            "the log has the tracebacks; correct or remove them: finished tasks are kept",
        )
    return known


_ANSWER = TypeAdapter(TasksAnswer)


def _run(
    paths: RunPaths, mode: str, request: dict[str, Any], *, allow_code: bool, arguments: list[str] | None = None
) -> None:
    paths.evaluation_hub.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "request.json"
        publish.write_json(file, request)
        status = subprocess.call(
            [str(paths.evaluation_python), "-m", _PROGRAM, mode, str(file), *(arguments or [])],
            # paths in the user's own tasks are relative to these
            cwd=paths.own_tasks or paths.directory,
            env=_variables(paths, allow_code),
        )
    if status:
        ended = f"signal {-status}" if status < 0 else f"exit status {status}"
        raise UserError(f"lm-evaluation-harness ended with {ended}", "see the lines above; finished tasks are kept")


def _variables(paths: RunPaths, allow_code: bool) -> dict[str, str]:
    given = os.environ
    cache = Path(given.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    variables = {
        **importing_the_kit(given),
        "HF_HOME": str(paths.evaluation_hub),
        # the user's own token, which HF_HOME would move
        "HF_TOKEN_PATH": given.get("HF_TOKEN_PATH", str(cache / "token")),
        "TRANSFORMERS_VERBOSITY": "error",
        "TQDM_MININTERVAL": str(_PROGRESS_SECONDS),
    }
    if allow_code:
        variables["HF_ALLOW_CODE_EVAL"] = "1"  # asked by the metric code_eval
    return variables
