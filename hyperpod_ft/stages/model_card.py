"""The model card: a README.md that describes how the model was made, with the exact run file."""

import re
from collections.abc import Sequence
from typing import Any

import yaml

from hyperpod_ft import __version__
from hyperpod_ft.config import yaml_text
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.runs.journal import Journal
from hyperpod_ft.runs.results.evaluation import EvaluationResult
from hyperpod_ft.runs.run import Run

_BEGIN, _END = "<!-- evaluation: begin -->", "<!-- evaluation: end -->"
# Facts of the training's record, with their labels in the card.
_TRAINING_FACTS = {
    "steps": "steps",
    "epochs": "epochs",
    "tokens": "tokens trained on, including padding",
    "final_loss": "final training loss",
    "validation_rewards/accuracies": "validation pairs whose chosen completion has the higher reward (share)",
}


def model_card(run: Run, chat_template: str, *, adapter: bool = False) -> str:
    """The card of the run's final model: facts in a table, and the run file. `chat_template`: what it writes.

    `adapter`: of its adapter alone.
    """
    config = run.config
    lora = config.training.method == "lora"
    header: dict[str, Any] = {
        "base_model": run.config.model.asset.short_name,  # the Hub rejects a card with a full path
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": _task(config),
        "tags": ["hyperpod-ft", config.training.objective, "lora" if lora else "full-fine-tuning"],
    }
    data = [part.dataset.asset for part in config.dataset.parts]
    # the Hub accepts only its own ids
    if ids := list(dict.fromkeys(asset.source for asset in data if asset.kind == "hub")):
        header["datasets"] = ids
    method = "LoRA"
    if lora:
        variants = [name for name in ("rslora", "dora") if getattr(config.lora, name)]
        variants += [f"plus_ratio {config.lora.plus_ratio:g}"] * (config.lora.plus_ratio != 1)
        variants += [f"{name} trained whole" for name in config.lora.modules_to_save]
        variants += [f"on a base in {config.lora.quantization}"] * (config.lora.quantization != "none")
        method += f" ({', '.join((f'r {config.lora.r}, alpha {config.lora.alpha:g}', *variants))})"
        method += ", merged" * (not adapter)
    rows = {
        "base model": ", ".join(filter(None, (run.config.model.asset.pinned, _finished(run.journal)))),
        **({"tokens added": " ".join(map(_code, config.model.added_tokens))} if config.model.added_tokens else {}),
        **({"adapter continued": config.model.adapter.asset.pinned} if config.model.adapter else {}),
        "dataset": ", ".join(dict.fromkeys(asset.pinned for asset in data)),
        "method": method if lora else "every parameter",
        **_objective(config),
        "run": f"{config.name}, {run.plan.run_id}",
        "made by": f"hyperpod-ft {__version__}",
        **_training(run.journal),
        "chat template": chat_template,
    }
    table = "\n".join(f"| {key} | {_cell(value)} |" for key, value in rows.items())
    text = yaml_text.dump(run.config)
    fence = _fence(text)
    return (
        f"---\n{yaml.safe_dump(header, sort_keys=False, allow_unicode=True)}---\n\n# {config.name}\n\n"
        f"Fine-tuned from {_cell(run.config.model.asset.short_name)}.\n\n| | |\n|---|---|\n{table}\n\n"
        f"## The run file that made it\n\n{fence}yaml\n{text}{fence}\n"
    )


def _task(config: RunConfig) -> str:
    """As the Hub names it."""
    if config.dataset.images:
        return "image-text-to-text"
    if config.training.objective == "reward":
        return "text-classification"
    return "text2text-generation" if config.dataset.max_target_length else "text-generation"


def with_evaluations(card: str, evaluations: Sequence[EvaluationResult]) -> str:
    """A card with a table of scores, which replaces the one it has. What its owner wrote around it stays."""
    before, _, rest = card.partition(_BEGIN)
    after = rest.partition(_END)[2]
    rows = "\n".join(
        f"| {_cell(evaluation.label(score.metric))} | {score.base} | {score.tuned} |"
        for evaluation in evaluations
        for score in evaluation.main_scores
    )
    made_by = {f"lm-evaluation-harness {evaluation.versions.get('lm_eval', '')}".strip() for evaluation in evaluations}
    section = (
        f"{_BEGIN}\n## Evaluation\n\n| task, metric | base model | this model |\n|---|---|---|\n{rows}\n\n"
        f"By {', '.join(sorted(made_by))}; ± is its standard error.\n{_END}"
    )
    return f"{before.rstrip()}\n\n{section}{after or chr(10)}"


def _objective(config: RunConfig) -> dict[str, str]:
    if config.training.objective == "sft":
        return {}
    if config.teacher:
        return {"objective": f"distillation of {config.teacher.asset.pinned}, beta {config.teacher.beta:g}"}
    if config.training.samples_answers:
        name = {"grpo": "group relative policy optimization (GRPO)", "rloo": "REINFORCE leave-one-out (RLOO)"}
        rewards = ", ".join(reward.known_as for reward in config.reward)
        return {"objective": f"{name[config.training.objective]}, beta {config.sampling.beta:g}, of {rewards}"}
    if config.training.objective == "reward":
        return {"objective": "reward model: one score (AutoModelForSequenceClassification), higher for chosen answers"}
    if config.training.objective == "kto":
        weights = f"weights {config.kto.desirable_weight:g} and {config.kto.undesirable_weight:g}"
        return {"objective": f"Kahneman-Tversky optimization (KTO), beta {config.kto.beta:g}, {weights}"}
    smoothing = f", label_smoothing {config.dpo.label_smoothing:g}" * (config.dpo.label_smoothing != 0)
    return {"objective": f"direct preference optimization, beta {config.dpo.beta:g}{smoothing}"}


def _training(journal: Journal) -> dict[str, str]:
    record = journal.record("train")
    known = record.facts if record else {}
    return {
        label: f"{known[key]:.6g}" if isinstance(known[key], float) else str(known[key])
        for key, label in _TRAINING_FACTS.items()
        if known.get(key) is not None
    }


def _finished(journal: Journal) -> str:
    """What stage download made of the model; nothing for most."""
    record = journal.record("download")
    return str(record.facts.get("model", {}).get("finished", "")) if record else ""


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "\\|").split())


def _code(value: str) -> str:
    """A code span: Markdown takes `<tool>` for HTML."""
    text = repr(value)
    fence = _fence(text, at_least=1)
    return f"{fence}{text}{fence}"


def _fence(text: str, at_least: int = 3) -> str:
    """A fence longer than any run of backticks in the text."""
    return "`" * max(at_least, 1 + max((len(ticks) for ticks in re.findall("`+", text)), default=0))
