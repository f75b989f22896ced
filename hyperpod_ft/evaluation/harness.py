"""lm-evaluation-harness as a program of its own: which tasks there are, and one model's scores of them.

    python -m hyperpod_ft.evaluation.harness tasks REQUEST ANSWER
    python -m hyperpod_ft.evaluation.harness scores REQUEST

Runs with the interpreter that has `lm_eval`, in a process of its own: what it loads is gone afterwards, and an error in
a task's code ends nothing else. Only this module knows the harness; names and results are those of version 0.4.13.
"""

import json
import math
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from hyperpod_ft import publish
from hyperpod_ft.errors import did_you_mean, first_sentence
from hyperpod_ft.runs.results.evaluation import Metric, ModelScores, Score

_RUNS_CODE = "runs code that the models write; set eval.allow_code_execution, or leave it out"
_NOT_METRICS = ("alias", "name", "sample_len", "sample_count")


@dataclass(frozen=True)
class TasksRequest:
    """Tasks to look up and to fetch the datasets of. `include_path`: a directory of the user's own tasks."""

    tasks: tuple[str, ...]
    include_path: str | None
    allow_code_execution: bool


@dataclass(frozen=True)
class TasksAnswer:
    """The tasks behind each name that was asked for, or one line about what is wrong with it."""

    found: dict[str, tuple[str, ...]]
    problems: dict[str, str]


@dataclass(frozen=True)
class ScoresRequest:
    """Tasks to evaluate a model with. `scores`: the file that gets them; what it has already is not done again."""

    title: str  # for the log: base model, tuned model
    model: str
    tokenizer: str
    tasks: tuple[str, ...]
    include_path: str | None
    num_fewshot: int | None
    limit: int | None
    batch_size: int | str
    apply_chat_template: bool
    allow_code_execution: bool
    device: str  # cpu or cuda
    scores: str
    conditions: dict[str, Any]


def look_up(request: TasksRequest) -> TasksAnswer:
    """Find the tasks and fetch their datasets, which the harness does when it creates a task."""
    from lm_eval.tasks import TaskManager  # noqa: PLC0415 - only this environment has it

    manager = TaskManager(include_path=request.include_path)
    found: dict[str, tuple[str, ...]] = {}
    problems: dict[str, str] = {}
    for name in request.tasks:
        if name not in manager.all_tasks:
            problems[name] = f"lm-evaluation-harness has no such task{did_you_mean(name, manager.all_tasks)}"
            continue
        if _runs_code(manager, name) and not request.allow_code_execution:
            problems[name] = _RUNS_CODE
            continue
        print(f"tasks: {name}", flush=True)
        try:
            tasks = manager.load([name])["tasks"]
        except Exception as error:  # a task may be any code
            traceback.print_exc()
            problems[name] = f"cannot be loaded: {_reason(error)}"
            continue
        unsafe = sorted(task for task, known in tasks.items() if getattr(known, "UNSAFE_CODE", False))
        if unsafe and not request.allow_code_execution:
            problems[name] = f"{unsafe[0]} {_RUNS_CODE}"
        else:
            found[name] = tuple(sorted(tasks))
    return TasksAnswer(found, problems)


def _runs_code(manager: Any, name: str) -> bool:
    """Whether a task's own YAML file says so: its Python functions may need that permission to be imported at all."""
    from lm_eval.tasks._yaml_loader import load_yaml  # noqa: PLC0415 - only this environment has it

    file = manager.task_index[name].yaml_path
    return file is not None and bool(load_yaml(file, resolve_func=False, recursive=True).get("unsafe_code"))


def score(request: ScoresRequest) -> None:
    """Evaluate one model, and write its scores after each task; a task that fails does not stop the others."""
    known = ModelScores.read(Path(request.scores), request.conditions)
    missing = [task for task in request.tasks if task not in known.tasks]
    from lm_eval.tasks import TaskManager  # noqa: PLC0415 - only this environment has it

    manager = TaskManager(include_path=request.include_path)
    model = _model(request)
    for task in missing:
        print(f"eval: {request.title}: {task}", flush=True)
        try:
            results = _evaluate(request, model, manager, task)
        except Exception as error:  # a task may be any code
            traceback.print_exc()
            _add(request, task, failed=_reason(error))
            continue
        _add(request, task, tuple(metrics(results)))


def _model(request: ScoresRequest) -> Any:
    from lm_eval.models.huggingface import HFLM  # noqa: PLC0415

    loaded = HFLM(
        pretrained=request.model,
        tokenizer=request.tokenizer,
        device=request.device,
        dtype="auto",  # that of the stored weights
        batch_size=request.batch_size,
        parallelize=request.device == "cuda" and _needs_every_gpu(Path(request.model)),
    )
    if getattr(loaded.model.config, "output_router_logits", False):
        # transformers computes the loss of routers then, which fails where a padded batch is continued
        loaded.model.config.output_router_logits = False
    return loaded


def _needs_every_gpu(model: Path) -> bool:
    """Whether the layers go to all GPUs of the node: the weights fill more than half of one."""
    import torch  # noqa: PLC0415 - the harness has imported it

    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return torch.cuda.device_count() > 1 and weights > torch.cuda.get_device_properties(0).total_memory / 2


def _evaluate(request: ScoresRequest, model: Any, manager: Any, task: str) -> Mapping[str, Any]:
    """The harness's results of one task or group. Its seeds are constants, the same for each model."""
    from lm_eval import simple_evaluate  # noqa: PLC0415 - only this environment has it

    results: Mapping[str, Any] = simple_evaluate(
        model=model,
        tasks=[task],
        task_manager=manager,
        num_fewshot=request.num_fewshot,
        batch_size=request.batch_size,
        limit=request.limit,
        apply_chat_template=request.apply_chat_template,
        confirm_run_unsafe_code=request.allow_code_execution,
        log_samples=False,
    )
    return results


def metrics(results: Mapping[str, Any]) -> Iterable[tuple[Metric, Score]]:
    """The numbers in the harness's results: under a task's name `metric,filter` and `metric_stderr,filter`."""
    groups: Mapping[str, list[str]] = results.get("group_subtasks", {})
    parents = {member: group for group, members in groups.items() for member in members}
    for task, values in results["results"].items():
        for key, value in values.items():
            name, comma, chosen = key.partition(",")
            if not comma or name in _NOT_METRICS or name.endswith("_stderr"):
                continue
            count = results.get("n-samples", {}).get(task, {}).get("effective")
            metric = Metric(
                task=task,
                name=name,
                filter=chosen,
                version=str(results.get("versions", {}).get(task, "")),
                num_fewshot=results.get("n-shot", {}).get(task),
                samples=count,
                part_of=parents.get(task, ""),
                higher_is_better=results.get("higher_is_better", {}).get(task, {}).get(name),
            )
            yield metric, Score(_number(value), _number(values.get(f"{name}_stderr,{chosen}")))


def _number(value: object) -> float | None:
    # `N/A` where the harness knows no standard error; numpy's numbers are such too
    return float(value) if isinstance(value, Real) and math.isfinite(value) else None


def _add(
    request: ScoresRequest, task: str, scores: tuple[tuple[Metric, Score], ...] = (), failed: str | None = None
) -> None:
    """Add a task to the file of scores, which another run may be adding to: base models are shared."""
    path = Path(request.scores)
    with publish.lock(path.with_suffix(".lock")):
        known = ModelScores.read(path, request.conditions)
        failures = {name: reason for name, reason in known.failed.items() if name != task}
        if failed is None:
            known = replace(known, tasks=known.tasks | {task: scores}, failed=failures)
        else:
            known = replace(known, failed=failures | {task: failed})
        known.write(path)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {first_sentence(error)}"


def main(arguments: list[str]) -> None:
    request = Path(arguments[1]).read_bytes()
    if arguments[0] == "tasks":
        answer = look_up(TypeAdapter(TasksRequest).validate_json(request))
        Path(arguments[2]).write_text(json.dumps(asdict(answer)), encoding="utf-8")
    else:
        score(TypeAdapter(ScoresRequest).validate_json(request))


if __name__ == "__main__":
    main(sys.argv[1:])
