"""A run file from another tool's configuration file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from hyperpod_ft.authoring.conversion import axolotl, llama_factory, trl
from hyperpod_ft.authoring.conversion.foreign_file import GIVE_DATASET, Conversion, Rule, convert_keys, read
from hyperpod_ft.authoring.draft import Draft
from hyperpod_ft.authoring.new_run import (
    complete,
    instance_of,
    name_run,
    set_cluster,
    set_dataset,
    set_datasets,
    written_source,
)
from hyperpod_ft.errors import UserError, printable


@dataclass(frozen=True)
class _Tool:
    name: str
    keys: frozenset[str]  # that only its files have
    rules: Mapping[str, Rule]
    objectives: Mapping[str, str]  # of keys whose files train something else than the kit does
    check_objective: Callable[[Conversion], None]
    finish: Callable[[Conversion], None]
    dpo: str  # what makes a file one for DPO


def _tool(name: str, keys: set[str], module: ModuleType, dpo: str) -> _Tool:
    return _Tool(name, frozenset(keys), module.RULES, module.OBJECTIVES, module.check_objective, module.finish, dpo)


_TOOLS = (
    _tool("axolotl", {"base_model"}, axolotl, "rl: dpo"),
    _tool(
        "LLaMA-Factory",
        {"stage", "finetuning_type", "cutoff_len", "lora_rank", "lora_target"},
        llama_factory,
        "stage: dpo",
    ),
    _tool("TRL", {"model_name_or_path"}, trl, "beta: 0.1"),
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

    Raises UserError when the file has none of these formats, trains what the kit does not, lacks a model or dataset, or
    nothing fits the memory.
    """
    values = read(path)
    tool = next((tool for tool in _TOOLS if tool.keys & values.keys()), None)
    if tool is None:
        raise UserError(
            f"{path}: has none of the keys of axolotl, LLaMA-Factory or TRL",
            "give a file with base_model or model_name_or_path",
        )
    draft = Draft()
    conversion = Conversion(draft, values, path, supplement.dataset is not None, supplement.format is not None)
    try:
        _check_objective(conversion, tool)
        convert_keys(conversion, tool.rules)
        tool.finish(conversion)
        _set_sources(conversion, supplement, output)
        listed = draft.get("dataset.sources") or [{"format": draft.get("dataset.format")}]
        preferences = any(one.get("format") == "preference" for one in listed)
        if preferences and draft.get("training.objective") != "dpo":
            raise UserError(
                "has a preference dataset but no DPO settings; files of reward models are not converted",
                f"if it is for DPO, add {tool.dpo}",
            )
    except UserError as error:
        raise UserError(f"{path}: {error.problem}", error.remedy) from error
    if tool.name == "TRL":
        trl.finish_with_format(conversion)
    _drop_what_has_no_effect(conversion)
    set_cluster(draft, instance_of(supplement.instance_type), supplement.nodes)
    name_run(draft)
    draft.head.insert(0, f"Converted from {printable(path.name)}, of {tool.name}, by `hyperpod-ft init --from`.")
    complete(draft, output, keep_batch=True)
    draft.end += [line for heading, lines in conversion.left().items() for line in (heading, *lines)]
    return conversion


def _check_objective(conversion: Conversion, tool: _Tool) -> None:
    """Raises UserError when the file trains something that the kit does not."""
    for key, objective in tool.objectives.items():
        if conversion.is_on(key):
            raise UserError(
                f"{key}: is for training {objective}", "the kit has supervised training, training on text, and DPO"
            )
    tool.check_objective(conversion)


def _set_sources(conversion: Conversion, supplement: Supplement, output: Path) -> None:
    draft = conversion.draft
    model = supplement.model or draft.get("model.source")
    dataset = supplement.dataset or draft.get("dataset.source")
    several = draft.get("dataset.sources")
    if not model:
        raise UserError("names no model", "give one with --model")
    draft.set("model.source", written_source(_found(conversion, model), output))
    if several and supplement.format:
        several = [one | {"format": supplement.format} for one in several]
    if several:
        set_datasets(draft, [one | {"source": _found(conversion, one["source"])} for one in several], output)
        return
    if not dataset:
        raise UserError("names no dataset", GIVE_DATASET)
    found = _found(conversion, dataset)
    known = supplement.format or draft.values.get("dataset", {}).pop("format", None)
    if known == "preference" and not supplement.format and Path(found).exists():
        known = None  # whether they are, their rows tell
    set_dataset(draft, found, known, output)


def _found(conversion: Conversion, source: str) -> str:
    """A source with the path that it means, if it is one: the other tools have no sign for paths."""
    if source.startswith(("s3://", "example:")):
        return source
    return str(conversion.find(source) or source)


def _drop_what_has_no_effect(conversion: Conversion) -> None:
    """Settings of what the other file does not switch on."""
    draft = conversion.draft
    for section, is_used, reason in (
        ("lora", draft.get("training.method") == "lora", "has no effect when all parameters are trained"),
        ("dpo", draft.get("training.objective") == "dpo", "has no effect without preferences"),
    ):
        for key in () if is_used else draft.values.pop(section, {}):
            conversion.housekeeping[f"{section}.{key}"] = reason
    if draft.get("training.objective") == "dpo" and draft.get("dataset.loss_on"):
        del draft.values["dataset"]["loss_on"]
        conversion.housekeeping["dataset.loss_on"] = "has no effect with preferences"
