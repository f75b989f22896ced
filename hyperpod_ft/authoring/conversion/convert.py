"""A run file from another tool's configuration file."""

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from hyperpod_ft.authoring.conversion import axolotl, images, llama_factory, objectives, trl
from hyperpod_ft.authoring.conversion.foreign_file import GIVE_DATASET, Conversion, convert_keys, read
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
from hyperpod_ft.config import engine_choice, run_file
from hyperpod_ft.errors import UserError, printable
from hyperpod_ft.planning.engine_rules import limits_of


@dataclass(frozen=True)
class _Tool:
    """`module` has the rules for its keys, what else it trains than the kit does, and what needs several keys."""

    name: str
    keys: set[str]  # that only its files have
    module: ModuleType
    for_pairs: str  # what makes a file one for DPO, or for a reward model


_TOOLS = (
    _Tool("axolotl", {"base_model"}, axolotl, "for DPO add rl: dpo, for a reward model reward_model: true"),
    _Tool(
        "LLaMA-Factory",
        {"stage", "finetuning_type", "cutoff_len", "lora_rank", "lora_target"},
        llama_factory,
        "for DPO set stage: dpo, for a reward model stage: rm",
    ),
    _Tool("TRL", {"model_name_or_path"}, trl, "for DPO add beta: 0.1, for a reward model lora_task_type: SEQ_CLS"),
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
    conversion = Conversion(draft, values, path, supplement.dataset, supplement.format)
    try:
        for key, other in tool.module.OTHERS.items():
            if conversion.is_on(key):
                raise UserError(f"{key}: is for training {other}", objectives.the_kit_has())
        objective: str = tool.module.objective_of(conversion)
        convert_keys(conversion, tool.module.rules_of(objective))
        objectives.set_objective(conversion, objective)
        tool.module.finish(conversion, objective)
        _set_sources(conversion, supplement, objective, output, rows_tell=tool.name == "TRL")
        listed = draft.get("dataset.sources") or [{"format": draft.get("dataset.format")}]
        preferences = any(one.get("format") == "preference" for one in listed)
        if preferences and not draft.get("training.objective"):
            raise UserError("has a preference dataset, but does not say what it trains", tool.for_pairs)
        if tool.name == "TRL":
            trl.finish_with_format(conversion)
        images.finish(conversion, objective, output)
    except UserError as error:
        raise UserError(f"{path}: {error.problem}", error.remedy) from error
    _drop_what_has_no_effect(conversion)
    set_cluster(draft, instance_of(supplement.instance_type), supplement.nodes)
    name_run(draft)
    _drop_what_the_engine_lacks(conversion)
    draft.head.insert(0, f"Converted from {printable(path.name)}, of {tool.name}, by `hyperpod-ft init --from`.")
    complete(draft, output, keep_batch=True)
    draft.end += [line for heading, lines in conversion.left().items() for line in (heading, *lines)]
    return conversion


def _set_sources(
    conversion: Conversion, supplement: Supplement, objective: str, output: Path, *, rows_tell: bool
) -> None:
    draft = conversion.draft
    for reward in draft.get("reward") or ():
        file, _, function = reward["function"].rpartition(":")
        if file:
            reward["function"] = f"{written_source(file, output)}:{function}"
    model = supplement.model or draft.get("model.source")
    dataset = supplement.dataset or draft.get("dataset.source")
    several = draft.get("dataset.sources")
    if not model:
        raise UserError("names no model", "give one with --model")
    draft.set("model.source", written_source(_found(conversion, model), output))
    if several and supplement.format:
        several = [one | {"format": supplement.format} for one in several]
    if several:
        several = [one | {"source": _found(conversion, one["source"])} for one in several]
        set_datasets(draft, [images.with_files(draft, one, rows_tell=rows_tell) for one in several], output)
        return
    if not dataset:
        raise UserError("names no dataset", GIVE_DATASET)
    selected = draft.values.get("dataset", {}) | {"source": _found(conversion, dataset)}
    draft.values["dataset"] |= images.with_files(draft, selected, rows_tell=rows_tell)
    found = str(draft.get("dataset.source"))
    known = supplement.format or draft.values.get("dataset", {}).pop("format", None)
    known = known or objectives.OBJECTIVES[objective].format
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
    objective = draft.get("training.objective") or "sft"
    for key in () if draft.get("training.method") == "lora" else draft.values.pop("lora", {}):
        conversion.housekeeping[f"lora.{key}"] = "has no effect when all parameters are trained"
    if objective != "sft" and draft.drop("dataset.loss_on"):
        conversion.housekeeping["dataset.loss_on"] = f"has no effect with objective {objective}"
    if not objectives.OBJECTIVES[objective].validates:
        draft.set("dataset.validation_share", 0.0, f"objective {objective} has no validation loss")
        for key in ("validate_every_steps", "keep_best", "early_stopping_patience"):
            if draft.drop(f"training.{key}"):
                conversion.changes[f"training.{key}"] = f"objective {objective} has no validation loss"


def _drop_what_the_engine_lacks(conversion: Conversion) -> None:
    """Settings that only engine torch has, of a run that needs engine trl; and of section trl on Trainium."""
    draft = conversion.draft
    if draft.get("engine") != "auto":
        for key in draft.values.pop("trl", {}):
            conversion.changes[f"trl.{key}"] = "only engine trl has it, which needs GPUs or CPUs"
        return
    while (config := engine_choice.with_engine(run_file.validate(draft.values, "run file"))).engine == "trl":
        try:
            limits_of("trl").check_settings(config)
        except UserError as error:
            key, _, reason = error.problem.partition(": ")
            if "." not in key or key == "training.method" or not draft.drop(key):
                raise
            conversion.changes[key] = reason
        else:
            return
