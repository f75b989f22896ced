"""axolotl's configuration (docs.axolotl.ai/docs/config-reference.html)."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hyperpod_ft.authoring.conversion import images, objectives, training_arguments
from hyperpod_ft.authoring.conversion.foreign_file import (
    ANY_NUMBER,
    GIVE_DATASET,
    Conversion,
    Rule,
    changes,
    convert_keys,
    housekeeping,
    is_unset,
    number,
    only,
    switch,
    text,
    used,
    whole_modules,
)
from hyperpod_ft.authoring.dataset_format import template, text_of
from hyperpod_ft.config.sections.cluster import PROJECT, PROJECT_CHARACTERS
from hyperpod_ft.errors import UserError

# what is trained when a key is on, beside `rl`
OTHERS = {
    "process_reward_model": "a model that rewards steps",
    "pretraining_dataset": "on a stream of text",
    "diffusion": "a diffusion model",
    "use_eaft": "with entropy-adaptive fine-tuning",
    "kd_trainer": "by distillation",
}
_FORMATS: dict[str, dict[str, Any]] = {
    "alpaca": {"format": "alpaca"},
    "chat_template": {"format": "chat"},
    "chat_template.default": {"format": "chat"},
    "alpaca_chat.load_qa": template("question", "answer"),
}
# forms of preferences whose rows have the fields of the kit's formats, or whole conversations
_PREFERENCES = re.compile(r"(chatml|llama3)\.(ultra|prompt_pairs|argilla_chat)|chat_template\.argilla_chat|passthrough")
# fields of rows, and what they are in the kit's format
_FIELDS: dict[str, dict[str, Any]] = {
    "chat": {
        "field_messages": "messages",
        "message_field_role": "role",
        "message_field_content": "content",
        "message_property_mappings": {"role": "role", "content": "content"},
    },
    "preference": {"field_messages": "prompt", "field_chosen": "chosen", "field_rejected": "rejected"},
}
# TRL's names for the settings of its trainers
_NAMES = {
    "rl_beta": "beta",
    "dpo_beta": "beta",
    "dpo_label_smoothing": "label_smoothing",
    "kto_desirable_weight": "desirable_weight",
    "kto_undesirable_weight": "undesirable_weight",
    "center_rewards_coefficient": "center_rewards_coefficient",
}
# the same of ShareGPT's conversations
_SHAREGPT: dict[str, Any] = {
    "field_messages": "conversations",
    "message_field_role": "from",
    "message_field_content": "value",
    "message_property_mappings": {"role": "from", "content": "value"},
}
_KERNEL_PLUGIN = re.compile(r"axolotl\.integrations\.(cut_cross_entropy|liger|kernels|expert_parallel|swanlab)\.\w+")


def _weights_and_biases(conversion: Conversion, key: str) -> None:
    mode = conversion.values.get("wandb_mode")
    if mode == "disabled":
        return
    project = str(conversion.values[key])
    why = "its key comes from the shell that submits (docs/seeing-a-run.md)"
    conversion.draft.set("tracking.trackers", ["wandb"], why)
    if not is_unset(mode) and mode != "online":
        conversion.draft.set("cluster.environment", {"WANDB_MODE": "offline"}, "from wandb_mode")
    if re.fullmatch(PROJECT, project, re.ASCII):
        conversion.draft.set("tracking.project", project)
    else:
        conversion.housekeeping[key] = f"a project has {PROJECT_CHARACTERS}: set tracking.project"


def _plugins(conversion: Conversion, key: str) -> None:
    plugins = conversion.values[key]
    if isinstance(plugins, list) and all(_KERNEL_PLUGIN.fullmatch(str(plugin)) for plugin in plugins):
        conversion.housekeeping[key] = "the kit has kernels and trackers of its own"
    else:
        conversion.changes[key] = "the kit has no plugins"


def _model_type(conversion: Conversion, key: str) -> None:
    known = ["ForCausalLM", "LMHeadModel"]
    known += ["ForSequenceClassification"] if conversion.is_on("reward_model") else []
    known += ["ForConditionalGeneration", "ForImageTextToText"] if conversion.is_on("processor_type") else []
    if not str(conversion.values[key]).endswith((*known,)):
        conversion.changes[key] = "the kit trains causal language models, and T5"


def _special_tokens(conversion: Conversion, key: str) -> None:
    tokens = conversion.values[key]
    known = ("pad_token", "additional_special_tokens")
    if not isinstance(tokens, dict) or any(value for name, value in tokens.items() if name not in known):
        conversion.changes[key] = "tokens are those of the model's tokenizer; model.new_special_tokens adds others"


def _trl(conversion: Conversion, key: str) -> None:
    """The settings of TRL's trainer, by TRL's names."""
    given = conversion.values[key]
    if not isinstance(given, dict) or conversion.values.get("rl") not in objectives.OBJECTIVES:
        conversion.changes[key] = "has settings of TRL's trainers, and is used with rl alone"
        return
    inner = replace(conversion, values=given, changes={}, housekeeping={})
    convert_keys(inner, objectives.trl_rules(conversion.values["rl"]))
    conversion.changes |= {f"{key}.{name}": why for name, why in inner.changes.items()}
    conversion.housekeeping |= {f"{key}.{name}": why for name, why in inner.housekeeping.items()}


# keys that another rule, or `finish`, reads
_READ_ELSEWHERE = (
    "base_model_config datasets rl reward_model adapter wandb_mode sample_packing micro_batch_size"
    " load_in_4bit"
    " lora_target_modules lora_target_parameters lora_target_linear excess_length_strategy val_set_size"
    " early_stopping_patience shuffle_merged_datasets tokens"
)
RULES: Mapping[str, Rule] = {
    **training_arguments.RULES,
    **dict.fromkeys(_READ_ELSEWHERE.split(), used),
    "base_model": text("model.source"),
    "revision_of_model": text("model.revision"),
    "model_type": _model_type,
    "wandb_project": _weights_and_biases,
    "sequence_len": number("dataset.max_length"),
    "num_epochs": number("training.epochs"),
    "optimizer": training_arguments.RULES["optim"],
    "lr_scheduler": training_arguments.RULES["lr_scheduler_type"],
    "lora_r": number("lora.r"),
    "lora_alpha": number("lora.alpha"),
    "lora_dropout": number("lora.dropout"),
    "peft_use_dora": switch("lora.dora"),
    "peft_use_rslora": switch("lora.rslora"),
    "loraplus_lr_ratio": number("lora.plus_ratio"),
    "num_labels": only(1, "a reward model has one score"),
    "processor_type": switch("dataset.images"),
    "freeze_mm_modules": housekeeping("adapters are in the language model, unless lora.image_tower is set"),
    **dict.fromkeys(("image_size", "image_resize_algorithm"), changes(images.SIZE)),
    "train_on_inputs": switch("dataset.loss_on", "all"),
    "float32": switch("training.precision", "fp32"),
    "bfloat16": training_arguments.RULES["bf16"],
    "float16": training_arguments.RULES["fp16"],
    "activation_offloading": switch("training.activation_offload"),
    "lora_modules_to_save": whole_modules,
    "lora_model_dir": changes("set model.adapter.source to it, or merge it into model.source first"),
    "chat_template": only("tokenizer_default", "chats take the template of the model's tokenizer"),
    "eot_tokens": changes("turns end as the template of the model's tokenizer writes them"),
    "special_tokens": _special_tokens,
    "plugins": _plugins,
    "trl": _trl,
    "test_datasets": changes("set dataset.validation_source, or dataset.validation_share"),
}


def rules_of(objective: str) -> Mapping[str, Rule]:
    return {**RULES, **objectives.named_rules(objective, _NAMES)}


def objective_of(conversion: Conversion) -> str:
    """Raises UserError when the kit does not have what the file trains."""
    alone = "reward" if conversion.is_on("reward_model") else "sft"
    objective = objectives.require("rl", str(conversion.values.get("rl") or alone))
    if conversion.values.get("adapter") not in (None, "", "lora", "qlora"):
        raise UserError("adapter: the kit has LoRA, QLoRA and training of all parameters", "use lora, qlora or none")
    return objective


def finish(conversion: Conversion, objective: str) -> None:
    """What needs more than one key."""
    draft, values = conversion.draft, conversion.values
    adapter = values.get("adapter")
    draft.set("training.method", "lora" if adapter else "full")
    if adapter == "qlora" or (adapter and conversion.is_on("load_in_4bit")):
        draft.set("lora.quantization", "nf4")
    _set_modules(conversion)
    special = values.get("special_tokens")
    conversion.set_new_tokens(
        values.get("tokens"), special.get("additional_special_tokens") if isinstance(special, dict) else None
    )
    known = objectives.OBJECTIVES[objective]
    if known.rewards:
        settings = values.get("trl")
        objectives.set_rewards(conversion, settings if isinstance(settings, dict) else {}, "trl.")
    training_arguments.set_batch(conversion, objective, "micro_batch_size", 1)
    packing = "auto" if conversion.is_on("sample_packing") and objective == "sft" else "none"
    if known.format != "prompt":
        strategy = values.get("excess_length_strategy")
        training_arguments.set_packing(conversion, packing, "truncate" if strategy == "truncate" else "drop")
        if strategy not in ("truncate", "raise"):
            draft.set("dataset.max_bad_rows", ANY_NUMBER, "axolotl drops rows that are too long, however many")
    training_arguments.set_validation_share(conversion, "val_set_size")
    if values.get("early_stopping_patience"):
        if draft.get("training.validate_every_steps"):
            draft.set("training.early_stopping_patience", conversion.number("early_stopping_patience"))
        else:
            conversion.changes["early_stopping_patience"] = "needs training.validate_every_steps; set both"
    if values.get("shuffle_merged_datasets") is False:
        conversion.changes["shuffle_merged_datasets"] = "rows are always shuffled, by seed"
    draft.default("training.epochs", 1, "axolotl's default")
    draft.default("dataset.max_length", 512, "axolotl's default")
    if not conversion.dataset:
        _set_dataset(conversion, objective)
    training_arguments.finish(conversion)


def _set_modules(conversion: Conversion) -> None:
    modules = conversion.values.get("lora_target_modules")
    conversion.set_target_parameters("lora_target_parameters")
    if conversion.is_on("lora_target_linear"):
        if not all(str(name).endswith("_proj") for name in (modules if isinstance(modules, list) else ())):
            conversion.changes["lora_target_modules"] = "the run adapts linear layers of attention and MLP alone"
    elif not is_unset(modules):
        conversion.set_target_modules("lora_target_modules", modules)
    elif conversion.values.get("adapter"):
        conversion.changes["lora_target_modules"] = "is not set: PEFT adapts some layers, the kit all linear ones"


def _set_dataset(conversion: Conversion, objective: str) -> None:
    entries = conversion.listed_datasets("datasets")
    whole = [entry.get("type") == "completion" for entry in entries]
    if any(whole) and not all(whole):
        raise UserError("datasets: has type completion beside others; the kit packs all sources alike", GIVE_DATASET)
    conversion.set_sources(
        [_source(conversion, f"datasets[{number}]", entry, objective) for number, entry in enumerate(entries)]
    )


def _source(conversion: Conversion, where: str, entry: Mapping[str, Any], objective: str) -> dict[str, Any]:
    """The keys of section dataset for one dataset. `where`: its key."""
    source: dict[str, Any] = {"source": str(entry.get("path", ""))}
    if files := entry.get("data_files"):
        source["files"] = files if isinstance(files, list) else [str(files)]
    source |= conversion.split(f"{where}.split", str(entry.get("split") or "train"))
    kind = entry.get("type")
    keys = _format(conversion, where, entry, objective)
    if keys is None and not conversion.format:
        raise UserError(f"{where}.type: is not one of the kit's formats", "pass --format")
    source |= keys or {}
    if keys is None or str(kind).startswith(("chatml", "llama3")):
        conversion.changes[f"{where}.type"] = "prompts are the kit's own: chats take the tokenizer's template"
    known = {"path", "type", "data_files", "split", "field", "ds_type", "roles_to_train"}
    for key in entry.keys() - known - _FIELDS.get((keys or {}).get("format", ""), {}).keys():
        if not is_unset(entry[key]):
            conversion.changes[f"{where}.{key}"] = "has no counterpart in section dataset"
    if entry.get("roles_to_train") not in (None, ["assistant"]):
        conversion.changes[f"{where}.roles_to_train"] = (
            "every answer of the assistant counts in the loss, and only these"
        )
    return source


def _format(conversion: Conversion, where: str, entry: Mapping[str, Any], objective: str) -> dict[str, Any] | None:
    """The dataset's format; None if it is another tool's own. Raises UserError for other fields than the kit reads."""
    rows, kind = objectives.OBJECTIVES[objective].format, entry.get("type")
    if rows == "prompt":
        if not is_unset(entry.get("type")):
            raise UserError(
                f"{where}.type: is a function that makes the rows",
                "write these, with a prompt and the columns of rewards, to a file, and give it with --dataset",
            )
        return {"format": rows}
    if rows and isinstance(kind, dict):
        return {"format": rows} if _names_the_same(kind) else None
    kind = str(kind)
    if kind.startswith("bradley_terry"):
        raise UserError(
            f"{where}.type: its rows have input, where those of format preference have prompt",
            "rename the field, and give the new file with --dataset",
        )
    if kind == "completion":
        conversion.draft.set(
            "dataset.packing", "wrapped", "cuts long texts into rows, as axolotl does, and joins short ones"
        )
        return text_of(str(entry.get("field") or "text"))
    if rows:
        known = _PREFERENCES.fullmatch(kind) or (rows == "preference" and kind.startswith("chat_template"))
        keys = {"format": rows} if known else None
        fields = {"field_messages": "messages", **entry} if kind == "chat_template.default" else entry
    else:
        keys, fields = _FORMATS.get(kind), entry
    of_format = _FIELDS.get((keys or {}).get("format", ""), {})
    if all(fields.get(field) in (None, name) for field, name in _SHAREGPT.items()) and "field_messages" in fields:
        of_format = of_format if rows else _SHAREGPT
    for field, name in of_format.items():
        if fields.get(field) not in (None, name):
            raise UserError(
                f"{where}.{field}: rows of format {keys['format'] if keys else ''} have {_names(name)}",
                "rename the fields of the rows, and give the new file with --dataset",
            )
    return keys


def _names_the_same(kind: Mapping[str, Any]) -> bool:
    """Whether a form of the user's own takes the fields of the kit's format as they are."""
    for key, value in kind.items():
        name = key.removeprefix("field_").removesuffix("_format")
        if key != "field_system" and value not in (None, "", name, f"{{{name}}}"):
            return False
    return True


def _names(name: Any) -> str:
    return " and ".join(name) if isinstance(name, dict) else str(name)
