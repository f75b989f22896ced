"""TRL's configuration: the file of `trl sft --config`, `trl kto --config` and others.

Defaults: those of trl/trainer/sft_config.py and its like of TRL 1, which differ from transformers' own.
"""

from collections.abc import Callable, Mapping
from typing import Any

from hyperpod_ft.authoring.conversion import objectives, training_arguments
from hyperpod_ft.authoring.conversion.foreign_file import (
    GIVE_DATASET,
    Conversion,
    Rule,
    changes,
    is_unset,
    number,
    switch,
    text,
    used,
    whole_modules,
)
from hyperpod_ft.authoring.dataset_format import LocalFiles, text_of
from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.data.source_files import ALL
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.trl.settings import PREFERENCE_LOSSES, SETTINGS

_TOKENIZER = "is taken from the model's own files"
_DTYPE = "a frozen model is in bf16, a trained one in fp32 and bf16 (training.precision)"
OTHERS: Mapping[str, str] = {}
# What a file is for, by keys that others do not have, the first that is there: it does not say. Those of GRPO are those
# of RLOO too, and some of DPO's those of KTO.
_OBJECTIVES: Mapping[str, tuple[str, ...]] = {
    "kto": ("desirable_weight", "undesirable_weight"),
    "reward": ("center_rewards_coefficient",),
    "ppo": ("reward_model_path", "num_ppo_epochs", "kl_coef"),
    "cpo": ("cpo_alpha", "simpo_gamma"),
    "distillation": ("teacher_model_name_or_path", "lmbda"),
    "rloo": ("normalize_advantages", "reward_clip_range"),
    "grpo": (
        *("reward_funcs", "num_generations", "use_vllm", "vllm_mode", "scale_rewards", "steps_per_generation"),
        *("num_iterations", "epsilon", "reward_weights", "generation_batch_size", "temperature", "log_completions"),
    ),
    "dpo": (
        *("beta", "precompute_ref_log_probs", "max_prompt_length", "reference_free", "f_divergence_type"),
        *("label_smoothing", "ld_alpha", "loss_weights", "use_weighting", "sync_ref_model", "rpo_alpha"),
    ),
}
_BY_NAMES = ("dpo", "kto", "reward")  # objectives whose keys tell them whatever their values are
_NO_DROPOUT = ("dpo", "kto", "reward")  # objectives with disable_dropout, which is on by default
_OF_KTO_TOO = ("beta", "precompute_ref_log_probs", "max_prompt_length", "sync_ref_model")
_KTO_LOSSES = ("kto", "apo_zero_unpaired")
_NO_SETTING = ("nll", "chunked_nll", "sigmoid", ["sigmoid"], "kto")  # losses that are defaults

# keys that another rule, or `finish`, reads
_READ_ELSEWHERE = (
    "dataset_name datasets dataset_train_split dataset_text_field per_device_train_batch_size truncation_mode"
    " packing packing_strategy completion_only_loss assistant_only_loss use_peft lora_target_modules"
    " lora_target_parameters load_in_4bit bnb_4bit_quant_type lora_task_type disable_dropout"
)
RULES: Mapping[str, Rule] = {
    **training_arguments.RULES,
    **dict.fromkeys(_READ_ELSEWHERE.split(), used),
    "model_name_or_path": text("model.source"),
    "model_revision": text("model.revision"),
    "dataset_config": changes("all files of the dataset are read: choose some with dataset.files"),
    "dataset_test_split": changes("set dataset.validation_source, or dataset.validation_share"),
    "num_train_epochs": number("training.epochs"),
    "max_length": number("dataset.max_length"),
    "max_seq_length": number("dataset.max_length"),
    "lora_r": number("lora.r"),
    "lora_alpha": number("lora.alpha"),
    "lora_dropout": number("lora.dropout"),
    "lora_modules_to_save": whole_modules,
    "use_rslora": switch("lora.rslora"),
    "use_dora": switch("lora.dora"),
    "activation_offloading": switch("training.activation_offload"),
    "dtype": changes(_DTYPE),
    "torch_dtype": changes(_DTYPE),
    "chat_template_path": changes(_TOKENIZER),
    "eos_token": changes(_TOKENIZER),
}


def rules_of(objective: str) -> Mapping[str, Rule]:
    return {**RULES, **objectives.trl_rules(objective)}


def objective_of(conversion: Conversion) -> str:
    """Raises UserError when the file is for an objective, or has a loss, that the kit does not have."""
    named = _objective_by_keys(conversion.values, conversion.is_on)
    if named not in ("sft", "dpo"):
        return named
    rows = _rows(conversion)
    of_dpo = {key for key in ("loss_type", *_OBJECTIVES["dpo"]) if key in conversion.values}
    if rows == "unpaired-preference":
        if other := {key for key in of_dpo.difference(_OF_KTO_TOO) if not is_unset(conversion.values[key])}:
            raise UserError(
                f"{min(other)}: is for `trl {named}`, and the rows are those of `trl kto`",
                "remove the key, or give other rows with --dataset",
            )
        return "kto"
    if named == "dpo" and rows is None and of_dpo <= {*_OF_KTO_TOO}:
        conversion.changes[min(of_dpo)] = "could also be of `trl kto`: for that, pass --format unpaired-preference"
    return named


def _objective_by_keys(values: Mapping[str, Any], is_on: Callable[[str], bool]) -> str:
    """The objective by the keys of the file."""
    loss = values.get("loss_type")
    losses = set(map(str, loss if isinstance(loss, list) else [loss]))
    if losses and losses <= {*_KTO_LOSSES}:
        return "kto"
    for objective, keys in _OBJECTIVES.items():
        for key in keys:
            if is_on(key) or (objective in _BY_NAMES and key in values):
                return objectives.require(key, objective)
    if values.get("lora_task_type") == "SEQ_CLS":
        return "reward"
    if is_unset(loss) or losses <= {"nll", "chunked_nll", "dft"}:
        return "sft"
    if losses <= {*PREFERENCE_LOSSES}:
        return "dpo"
    raise UserError("loss_type: no objective of the kit has this loss", objectives.the_kit_has())


def _rows(conversion: Conversion) -> str | None:
    """The format of the rows; None if they are not here."""
    source = conversion.dataset or conversion.values.get("dataset_name")
    path = conversion.find(source) if isinstance(source, str) and source else None
    if conversion.format or path is None:
        return conversion.format
    try:
        found = LocalFiles.of(path, Dataset.model_fields["files"].default, ALL).format()
    except UserError:
        return None
    return str(found.keys["format"])


def finish(conversion: Conversion, objective: str) -> None:
    """What needs more than one key, and TRL's defaults."""
    draft, values = conversion.draft, conversion.values
    draft.set("training.method", "lora" if conversion.is_on("use_peft") else "full")
    if conversion.is_on("use_peft"):
        _set_lora(conversion, objective)
    if objective in _NO_DROPOUT and not _disables_dropout(conversion) and not draft.get("lora.dropout"):
        conversion.changes["disable_dropout"] = "without lora.dropout, the model's own dropout is off too"
    # its files do not say
    draft.head.append(f"Taken for a file of `trl {objective}`.")
    if not conversion.dataset:
        _set_dataset(conversion, objective)
    known = objectives.OBJECTIVES[objective]
    if known.rewards:
        objectives.set_rewards(conversion, values)
    if objective == "grpo" and not values.keys() & (SETTINGS["grpo"].keys() - SETTINGS["rloo"].keys()):
        conversion.changes["reward_funcs"] = (
            "could also be of `trl rloo`: for that, set training.objective: rloo, sampling.beta: 0.05 and"
            " sampling.generations: 2, unless the file gives others"
        )
    if values.get("loss_type") in _NO_SETTING:
        draft.drop("trl.loss_type")
    draft.default("training.learning_rate", known.learning_rate, "TRL's default")
    draft.default("training.schedule", "linear", "TRL's default")
    draft.default("training.warmup_share", 0.0, "TRL's default")
    draft.default("dataset.max_length", 1024, "TRL's default")
    draft.default("dataset.validation_share", 0.0, "TRL holds out no rows")
    if "gradient_checkpointing" not in values:
        draft.set("training.activation_checkpointing", "full", "TRL's default")
    training_arguments.set_batch(conversion, objective, "per_device_train_batch_size", 8)
    if values.get("truncation_mode") not in (None, "keep_start"):
        conversion.changes["truncation_mode"] = "a row that is too long loses its end"
    packed, strategy = conversion.is_on("packing"), values.get("packing_strategy")
    if packed and strategy not in (None, "bfd"):
        conversion.changes["packing_strategy"] = (
            "the kit has bfd and wrapped, where examples do not attend to one another"
        )
    packing = ("wrapped" if strategy == "wrapped" else "auto") if packed else "none"
    if known.format != "prompt":
        training_arguments.set_packing(conversion, packing)
    if objective == "sft":
        _set_loss(conversion)
    training_arguments.finish(conversion)


def _disables_dropout(conversion: Conversion) -> bool:
    return conversion.values.get("disable_dropout") is None or conversion.is_on("disable_dropout")


def _set_lora(conversion: Conversion, objective: str) -> None:
    draft, values = conversion.draft, conversion.values
    modules = values.get("lora_target_modules")
    if objective in _NO_DROPOUT and _disables_dropout(conversion):
        draft.set("lora.dropout", 0.0, "disable_dropout, which is TRL's default")
    conversion.set_target_parameters("lora_target_parameters")
    for key, value in (("dropout", 0.05), ("r", 16), ("alpha", 32)):
        draft.default(f"lora.{key}", value, "TRL's default")
    if is_unset(modules):
        conversion.changes["lora_target_modules"] = "is not set: PEFT adapts some layers, the kit all linear ones"
    else:
        conversion.set_target_modules("lora_target_modules", modules)
    if conversion.is_on("load_in_4bit"):
        draft.set("lora.quantization", "nf4")
        if values.get("bnb_4bit_quant_type") not in (None, "nf4"):
            conversion.changes["bnb_4bit_quant_type"] = "the kit's 4 bits are nf4"


def _set_dataset(conversion: Conversion, objective: str) -> None:
    values = conversion.values
    split, where = values.get("dataset_train_split"), "dataset_train_split"
    source = str(values.get("dataset_name") or "")
    if not is_unset(values.get("datasets")):
        entry, *others = conversion.listed_datasets("datasets")
        if others:
            raise UserError(
                f"datasets: does not tell the formats of these {len(others) + 1}",
                f"list them as dataset.sources in the run file, and {GIVE_DATASET}",
            )
        source = str(entry.get("path", ""))
        split, where = entry.get("split"), "datasets[0].split"
        for key in entry.keys() - {"path", "split"}:
            conversion.changes[f"datasets[0].{key}"] = "has no counterpart: choose files with dataset.files"
    field = values.get("dataset_text_field")
    of_objective = objectives.OBJECTIVES[objective].format
    keys = {"format": of_objective} if of_objective else {} if is_unset(field) else text_of(str(field))
    conversion.set_sources([{"source": source, **conversion.split(where, str(split or "train")), **keys}])


def _set_loss(conversion: Conversion) -> None:
    """By default TRL trains on all of a conversation, and on the completion alone of a prompt and completion."""
    for key in ("completion_only_loss", "assistant_only_loss"):
        if key in conversion.values:
            conversion.draft.set("dataset.loss_on", "completion" if conversion.is_on(key) else "all")


def finish_with_format(conversion: Conversion) -> None:
    """The part of the conversion that the dataset's format decides."""
    if conversion.draft.get("dataset.format") == "chat":
        conversion.draft.default("dataset.loss_on", "all", "TRL's default: of a chat, every token counts")
