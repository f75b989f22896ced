"""axolotl's configuration (docs.axolotl.ai/docs/config-reference.html)."""

import re
from collections.abc import Mapping
from typing import Any

from hyperpod_ft.authoring.conversion import training_arguments
from hyperpod_ft.authoring.conversion.foreign_file import (
    Conversion,
    Rule,
    is_unset,
    left,
    number,
    switch,
    text,
    used,
)
from hyperpod_ft.authoring.dataset_format import template
from hyperpod_ft.config.sections.tracking import PROJECT, PROJECT_CHARACTERS
from hyperpod_ft.errors import UserError

_FROM_MODEL = "is taken from the model's own files"
_KERNELS = "engine torch has its own kernels"
_LAYOUT = "degrees and sharding are chosen for the instance type (section parallelism)"
_PER_EPOCH = "the kit counts steps: set training.{}"

_FORMATS: dict[str, dict[str, Any]] = {
    "alpaca": {"format": "alpaca"},
    "completion": {"format": "text", "loss_on": "all"},
    "chat_template": {"format": "chat"},
    "chat_template.default": {"format": "chat"},
    "alpaca_chat.load_qa": template("question", "answer"),
}


def _weights_and_biases(conversion: Conversion, key: str) -> None:
    mode = conversion.values.get("wandb_mode")
    if mode == "disabled":
        return
    project = str(conversion.values[key])
    conversion.draft.set("tracking.trackers", ["wandb"], "its key comes from the shell that submits (docs/tracking.md)")
    if not is_unset(mode) and mode != "online":
        conversion.draft.set("cluster.environment", {"WANDB_MODE": "offline"}, "from wandb_mode")
    if re.fullmatch(PROJECT, project, re.ASCII):
        conversion.draft.set("tracking.project", project)
    else:
        conversion.left[key] = f"a project has {PROJECT_CHARACTERS}: set tracking.project"


RULES: Mapping[str, Rule] = {
    **training_arguments.RULES,
    "base_model": text("model.source"),
    "revision_of_model": text("model.revision"),
    "datasets": used,
    "rl": used,
    "adapter": used,
    "wandb_mode": used,
    "wandb_entity": left("export WANDB_ENTITY in the shell that submits"),
    "sample_packing": used,
    "micro_batch_size": used,
    "gradient_accumulation_steps": used,
    "load_in_4bit": used,
    "load_in_8bit": left("the kit keeps a frozen model in bf16, or in 4 bits (lora.quantization: nf4)"),
    "lora_target_modules": used,
    "lora_target_linear": used,
    "sequence_len": number("dataset.max_length"),
    "val_set_size": used,
    "num_epochs": number("training.epochs"),
    "optimizer": training_arguments.RULES["optim"],
    "lr_scheduler": training_arguments.RULES["lr_scheduler_type"],
    "lora_r": number("lora.r"),
    "lora_alpha": number("lora.alpha"),
    "lora_dropout": number("lora.dropout"),
    "peft_use_dora": switch("lora.dora"),
    "peft_use_rslora": switch("lora.rslora"),
    "loraplus_lr_ratio": number("lora.plus_ratio"),
    "early_stopping_patience": used,
    "dpo_beta": number("dpo.beta"),
    "rl_beta": number("dpo.beta"),
    "train_on_inputs": switch("dataset.loss_on", "all"),
    "float32": switch("training.precision", "fp32"),
    "bfloat16": training_arguments.RULES["bf16"],
    "float16": training_arguments.RULES["fp16"],
    "activation_offloading": switch("training.activation_offload"),
    "evals_per_epoch": left(_PER_EPOCH.format("validate_every_steps")),
    "saves_per_epoch": left(_PER_EPOCH.format("save_every_steps")),
    "lora_modules_to_save": left("the kit trains adapters of linear layers and embeddings: see lora.target_modules"),
    "lora_model_dir": left("the kit starts new adapters; merge the earlier one into model.source first"),
    "lora_fan_in_fan_out": left(_FROM_MODEL),
    **dict.fromkeys(
        (
            "model_type",
            "tokenizer_type",
            "tokenizer_config",
            "special_tokens",
            "tokens",
            "chat_template",
            "is_llama_derived_model",
        ),
        left(_FROM_MODEL),
    ),
    **dict.fromkeys(
        (
            "xformers_attention",
            "sdp_attention",
            "sdpa_attention",
            "s2_attention",
            "attention",
            "liger_rope",
            "liger_rms_norm",
            "liger_glu_activation",
            "liger_fused_linear_cross_entropy",
            "lora_mlp_kernel",
            "lora_qkv_kernel",
            "lora_o_kernel",
            "cut_cross_entropy",
        ),
        left(_KERNELS),
    ),
    **dict.fromkeys(
        (
            "wandb_watch",
            "wandb_name",
            "wandb_run_id",
            "wandb_log_model",
            "mlflow_tracking_uri",
            "mlflow_experiment_name",
            "use_tensorboard",
        ),
        left(training_arguments.METRICS),
    ),
    **dict.fromkeys(
        (
            "sequence_parallel_degree",
            "context_parallel_size",
            "tensor_parallel_size",
            "dp_shard_size",
            "dp_replicate_size",
            "fsdp_version",
            "fsdp_final_state_dict_type",
            "local_rank",
            "world_size",
        ),
        left(_LAYOUT),
    ),
    "wandb_project": _weights_and_biases,
    "dataset_prepared_path": left("prepared datasets are kept below cluster.root"),
    "dataset_processes": left("see dataset.workers"),
    "eval_sample_packing": left("validation rows are packed as training rows are"),
    "pad_to_sequence_len": left("every row has dataset.max_length tokens"),
    "eval_table_size": left("samples.json has answers of both models (section generate)"),
    "test_datasets": left("validation rows are held out of the training data: set dataset.validation_share"),
    "shuffle_merged_datasets": left("rows are always shuffled, by seed"),
    "plugins": left("the kit has no plugins"),
    "strict": left("unknown keys are always an error"),
    "debug": left("has no counterpart"),
}


def finish(conversion: Conversion) -> None:
    """What needs more than one key."""
    draft, values = conversion.draft, conversion.values
    adapter = values.get("adapter")
    if adapter not in (None, "", "lora", "qlora"):
        conversion.left["adapter"] = "the kit has LoRA and training of all parameters; it uses LoRA"
    draft.set("training.method", "full" if adapter in (None, "") else "lora")
    if adapter == "qlora" or (adapter and conversion.is_on("load_in_4bit")):
        draft.set("lora.quantization", "nf4")
    modules = values.get("lora_target_modules")
    if modules and not conversion.is_on("lora_target_linear"):
        draft.set("lora.target_modules", modules if isinstance(modules, list) else [str(modules)])
    rl = values.get("rl")
    if rl not in (None, "", "dpo"):
        raise UserError("rl: the kit has supervised training and DPO", "train with rl: dpo, or without rl")
    if rl:
        draft.set("training.objective", "dpo")
    training_arguments.set_batch(conversion, "micro_batch_size", 1)
    training_arguments.set_packing(conversion, "bfd" if conversion.is_on("sample_packing") and not rl else "none")
    training_arguments.set_validation_share(conversion, "val_set_size")
    if values.get("early_stopping_patience"):
        if draft.get("training.validate_every_steps"):
            draft.set("training.early_stopping_patience", conversion.number("early_stopping_patience"))
        else:
            conversion.left["early_stopping_patience"] = "needs training.validate_every_steps; set both"
    draft.default("training.epochs", 1, "axolotl's default")
    draft.default("dataset.max_length", 512, "axolotl's default")
    _set_dataset(conversion, "preference" if rl else "")
    training_arguments.finish(conversion)


def _set_dataset(conversion: Conversion, given: str) -> None:
    entries = conversion.values.get("datasets") or []
    if not isinstance(entries, list) or not entries or not isinstance(entries[0], dict):
        conversion.left["datasets"] = "is not a list of datasets"
        return
    first = entries[0]
    for index in range(1, len(entries)):
        conversion.left[f"datasets[{index}]"] = "a run has one dataset; concatenate their rows"
    conversion.draft.set("dataset.source", str(first.get("path", "")))
    for key, value in first.items():
        if key not in ("path", "type", "data_files") and not is_unset(value):
            conversion.left[f"datasets[0].{key}"] = _reason(key)
    files = first.get("data_files")
    if files:
        conversion.draft.set("dataset.files", files if isinstance(files, list) else [str(files)])
    kind = first.get("type")
    keys: dict[str, Any] | None = {"format": given} if given else _FORMATS.get(str(kind))
    if keys:
        for key, value in keys.items():
            conversion.draft.default(f"dataset.{key}", value)
    elif not is_unset(kind):
        conversion.left["datasets[0].type"] = "is not one of the kit's formats"


def _reason(key: str) -> str:
    if key in ("field_messages", "message_property_mappings", "roles", "message_field_role", "message_field_content"):
        return "rows of format chat have messages of role and content; rename the fields if these differ"
    if key in ("field_chosen", "field_rejected"):
        return "rows of format preference have prompt, chosen and rejected; rename the fields if these differ"
    if key == "ds_type":
        return "the type of a file is known from its name"
    if key in ("split", "name", "shards"):
        return "dataset.files chooses what is read"
    return "has no counterpart; format template can name other fields"
