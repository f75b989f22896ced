"""A run file from another tool's configuration file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ft.authoring.conversion import axolotl, llama_factory, trl
from hyperpod_ft.authoring.conversion.foreign_file import Conversion, Rule, convert_keys, read
from hyperpod_ft.authoring.draft import Draft
from hyperpod_ft.authoring.new_run import complete, instance_of, name_run, set_cluster, set_dataset, written_source
from hyperpod_ft.errors import UserError
from hyperpod_ft.terminal import printable


@dataclass(frozen=True)
class _Tool:
    name: str
    keys: frozenset[str]  # that only its files have
    rules: Mapping[str, Rule]
    finish: Callable[[Conversion], None]


_TOOLS = (
    _Tool("axolotl", frozenset({"base_model"}), axolotl.RULES, axolotl.finish),
    _Tool(
        "LLaMA-Factory",
        frozenset({"stage", "finetuning_type", "cutoff_len", "lora_rank", "lora_target"}),
        llama_factory.RULES,
        llama_factory.finish,
    ),
    _Tool("TRL", frozenset({"model_name_or_path"}), trl.RULES, trl.finish),
)


@dataclass(frozen=True)
class Supplement:
    """What the other file does not have, or what takes the place of what it has."""

    instance_type: str
    nodes: int = 1
    model: str | None = None
    dataset: str | None = None
    format: str | None = None


def convert(path: Path, supplement: Supplement, output: Path) -> Conversion:
    """A configuration file of axolotl, LLaMA-Factory or TRL, converted to a run file that is to be written to `output`.

    Raises UserError when the file has none of these formats, lacks a model or dataset, or nothing fits the memory.
    """
    values = read(path)
    tool = next((tool for tool in _TOOLS if tool.keys & values.keys()), None)
    if tool is None:
        raise UserError(
            f"{path}: has none of the keys of axolotl, LLaMA-Factory or TRL",
            "give a file with base_model or model_name_or_path",
        )
    draft = Draft()
    conversion = Conversion(draft, values, path.parent)
    try:
        convert_keys(conversion, tool.rules)
        tool.finish(conversion)
    except UserError as error:
        raise UserError(f"{path}: {error.problem}", error.remedy) from error
    _set_sources(conversion, supplement, path, output)
    if draft.get("dataset.format") == "preference":
        draft.set("training.objective", "dpo")
    if tool.name == "TRL":
        trl.finish_with_format(conversion)
    _drop_what_has_no_effect(conversion)
    set_cluster(draft, instance_of(supplement.instance_type), supplement.nodes)
    name_run(draft)
    # names of keys may hold sequences that control a terminal, and line breaks
    conversion.left = {printable(key): reason for key, reason in conversion.left.items()}
    draft.head.append(f"Converted from {printable(path.name)}, of {tool.name}, by `hyperpod-ft init --from`.")
    draft.end += [f"Not converted: {key}: {reason}" for key, reason in conversion.left.items()]
    complete(draft, output, keep_batch=True)
    return conversion


def _set_sources(conversion: Conversion, supplement: Supplement, path: Path, output: Path) -> None:
    draft = conversion.draft
    model = supplement.model or draft.get("model.source")
    dataset = supplement.dataset or draft.get("dataset.source")
    if not model:
        raise UserError(f"{path}: names no model that can be used", "give one with --model")
    if not dataset:
        reasons = [f"{key} {conversion.left[key]}" for key in ("dataset", "datasets") if key in conversion.left]
        raise UserError(f"{path}: {next(iter(reasons), 'names no dataset')}", "give one with --dataset")
    draft.set("model.source", _found(model, path, output))
    known = supplement.format or (None if supplement.dataset else draft.get("dataset.format"))
    if supplement.dataset:
        conversion.left.pop("dataset", None)  # it takes the place of that
        for key in ("format", "prompt_template", "completion_template", "files"):
            draft.values["dataset"].pop(key, None)
    set_dataset(draft, _found(dataset, path, output), known, output)


def _found(source: str, path: Path, output: Path) -> str:
    """A source as the run file names it: the other tools take paths from where they are started, or from the file."""
    return written_source(source if Path(source).exists() else _beside(source, path), output)


def _beside(source: str, path: Path) -> str:
    beside = path.parent / source
    return str(beside) if not source.startswith(("s3://", "example:")) and beside.exists() else source


def _drop_what_has_no_effect(conversion: Conversion) -> None:
    """Settings of what the other file does not switch on."""
    draft = conversion.draft
    for section, is_used, reason in (
        ("lora", draft.get("training.method") == "lora", "has no effect when all parameters are trained"),
        ("dpo", draft.get("training.objective") == "dpo", "has no effect without preferences"),
    ):
        for key in () if is_used else draft.values.pop(section, {}):
            conversion.left[f"{section}.{key}"] = reason
    if draft.get("training.objective") == "dpo" and draft.get("dataset.loss_on"):
        del draft.values["dataset"]["loss_on"]
        conversion.left["dataset.loss_on"] = "has no effect with preferences"
