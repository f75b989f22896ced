"""Stage `eval`: the scores of the base and the tuned model on tasks of lm-evaluation-harness, under equal conditions.

    python -m hyperpod_ft.stages.eval RUN_DIR

Runs with the interpreter that stage `tasks` has prepared, and without the network. Each model has a file of scores that
grows by a task at a time: an attempt that is killed repeats only the task it was at. Runs share the base model's.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hyperpod_ft import publish
from hyperpod_ft.checkpoint.formats import model_directory
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sections.results import Eval
from hyperpod_ft.digests import text_sha256
from hyperpod_ft.errors import UserError
from hyperpod_ft.evaluation import harness_process
from hyperpod_ft.evaluation.harness import ScoresRequest
from hyperpod_ft.runs.records import CARD
from hyperpod_ft.runs.results.evaluation import EvaluationResult, ModelScores, compare, evaluations
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import RunPaths
from hyperpod_ft.stages import stage
from hyperpod_ft.stages.model_card import with_evaluations


def work(run: Run) -> stage.Result:
    section = run.config.eval
    assert section is not None, "a run with this stage has the section"
    device, device_name = _device(run.config)
    versions = {name: version for name, version in stage.versions().items() if name != "hyperpod-ft"}
    conditions = _conditions(section, run.paths.tuned_model, device_name, versions)
    file = f"{text_sha256(json.dumps(conditions, sort_keys=True))[:16]}.json"
    if run.paths.evaluation_forced.exists():
        _discard_scores(run.paths.base_scores / file, conditions, section.tasks)
        run.paths.evaluation_forced.unlink()
    # one after the other, each in its own process, so that only one is in memory
    base = _scores(
        run.paths, section, "base model", run.paths.base_model, run.paths.base_scores / file, device, conditions
    )
    tuned = _scores(
        run.paths, section, "tuned model", run.paths.tuned_model, run.paths.tuned_scores / file, device, conditions
    )
    evaluation = EvaluationResult(
        tasks=section.tasks,
        limit=section.limit,
        apply_chat_template=section.apply_chat_template,
        scores=compare(base, tuned, section.tasks),
        versions=versions,
        device=device_name,
    )
    for score in evaluation.main_scores:
        print(f"eval: {evaluation.label(score.metric)}: base {score.base}, tuned {score.tuned}", flush=True)
    # the record comes last, and is not among the recorded ones yet
    card = run.paths.tuned_model / CARD
    text = card.read_text(encoding="utf-8") if card.exists() else ""
    publish.write_text(card, with_evaluations(text, [*evaluations(run), evaluation]))
    return stage.Result((), evaluation.as_facts())


def _scores(
    paths: RunPaths, section: Eval, title: str, model: Path, file: Path, device: str, conditions: dict[str, Any]
) -> ModelScores:
    print(f"eval: {title}: {model} on {conditions['device']}", flush=True)
    request = ScoresRequest(
        title=title,
        model=str(model),
        # both get the same tokens: only the tuned model's directory is sure to have a chat template
        tokenizer=str(paths.tuned_model),
        tasks=section.tasks,
        include_path=str(paths.own_tasks) if paths.own_tasks else None,
        num_fewshot=section.num_fewshot,
        limit=section.limit,
        batch_size=section.batch_size,
        apply_chat_template=section.apply_chat_template,
        allow_code_execution=section.allow_code_execution,
        device=device,
        scores=str(file),
        conditions=conditions,
    )
    return harness_process.scores(paths, request)


def _discard_scores(file: Path, conditions: dict[str, Any], tasks: Sequence[str]) -> None:
    """Remove these tasks from a file of scores; what other runs have asked for stays."""
    if file.exists():
        with publish.lock(file.with_suffix(".lock")):
            scores = ModelScores.read(file, conditions)
            kept = {name: results for name, results in scores.tasks.items() if name not in tasks}
            replace(scores, tasks=kept).write(file)


def _conditions(section: Eval, tuned_model: Path, device: str, versions: dict[str, str]) -> dict[str, Any]:
    """What scores depend on besides the model and the task: with others, a model is evaluated again."""
    template = _chat_template(tuned_model) if section.apply_chat_template else None
    return {
        **section.model_dump(mode="json", include={"num_fewshot", "limit", "batch_size", "include_revision"}),
        "chat_template": text_sha256(template) if template else None,
        "device": device,
        "versions": versions,
    }


def _chat_template(model: Path) -> str:
    """The template, or the tokenizer's settings that contain it. Raises UserError when the model has none."""
    if not model_directory.has_chat_template(model):
        raise UserError(f"eval.apply_chat_template: {model} has no chat template", "leave it out")
    text = model_directory.chat_template(model)
    return text or (model / model_directory.TOKENIZER_CONFIG).read_text(encoding="utf-8")


def _device(config: RunConfig) -> tuple[str, str]:
    """The device's kind for torch, cpu or cuda, and its name."""
    wanted = config.instance.device
    if wanted == "cuda":
        import torch  # noqa: PLC0415 - the others need no torch in this process

        if torch.cuda.is_available():
            count = torch.cuda.device_count()
            return "cuda", torch.cuda.get_device_name(0) + (f" x {count}" if count > 1 else "")
        print("eval: torch finds no cuda device on this node; using the CPU", flush=True)
    elif wanted == "neuron":
        print("eval: lm-evaluation-harness does not run on Trainium; using the CPU", flush=True)
    return "cpu", "cpu"


if __name__ == "__main__":
    stage.main("eval", work)
