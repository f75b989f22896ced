"""LLaMA-Factory's configuration, the file of `llamafactory-cli train`, and its dataset_info.json."""

import json
from collections.abc import Mapping
from pathlib import Path
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
from hyperpod_ft.errors import UserError

_WHERE = "a run is kept below cluster.root, by its name"

RULES: Mapping[str, Rule] = {
    **training_arguments.RULES,
    "model_name_or_path": text("model.source"),
    "model_revision": text("model.revision"),
    "stage": used,
    "finetuning_type": used,
    "dataset": used,
    "dataset_dir": used,
    "eval_dataset": left("validation rows are held out of the training data: set dataset.validation_share"),
    "val_size": used,
    "cutoff_len": number("dataset.max_length"),
    "packing": used,
    "neat_packing": used,
    "train_on_prompt": switch("dataset.loss_on", "all"),
    "mask_history": left("of a chat, every answer counts in the loss"),
    "per_device_train_batch_size": used,
    "gradient_accumulation_steps": used,
    "num_train_epochs": number("training.epochs"),
    "pure_bf16": switch("training.precision", "bf16"),
    "lora_rank": number("lora.r"),
    "lora_alpha": number("lora.alpha"),
    "lora_dropout": number("lora.dropout"),
    "lora_target": used,
    "use_rslora": switch("lora.rslora"),
    "use_dora": switch("lora.dora"),
    "loraplus_lr_ratio": number("lora.plus_ratio"),
    "quantization_bit": used,
    "quantization_method": left("the kit's 4 bits are nf4"),
    "pref_beta": number("dpo.beta"),
    "pref_loss": used,
    "enable_liger_kernel": left("engine torch has its own kernels"),
    "template": left("the tokenizer's own chat template is used; format alpaca has Stanford Alpaca's text"),
    "max_samples": left("all rows are used; give fewer in dataset.files"),
    "adapter_name_or_path": left("the kit starts new adapters; merge the earlier one into model.source first"),
    "ref_model": left("the reference of DPO is the base model"),
    "additional_target": left("the kit trains adapters of linear layers and embeddings: see lora.target_modules"),
    "flash_attn": left("engine torch chooses its own attention kernel"),
    "rope_scaling": left("is taken from the model's own files"),
    "preprocessing_num_workers": left("see dataset.workers"),
    "preprocessing_batch_size": left("see dataset.workers"),
    "overwrite_cache": left("the prepared dataset is made again when its settings change"),
    "tokenized_path": left("prepared datasets are kept below cluster.root"),
    "plot_loss": left("the kit writes metrics.jsonl in the run directory"),
    "include_num_input_tokens_seen": left("metrics.jsonl has the tokens of each step"),
    "streaming": left("the dataset is prepared once, by stage dataset"),
    "upcast_layernorm": left("the kit keeps norms of a trained model in fp32"),
    "export_dir": left(_WHERE),
}
_TARGETS_ALL = ("all", "", None)


def finish(conversion: Conversion) -> None:
    """What needs more than one key, and LLaMA-Factory's defaults."""
    draft, values = conversion.draft, conversion.values
    stage = str(values.get("stage", "sft"))
    if stage not in ("sft", "dpo", "pt"):
        raise UserError("stage: the kit has supervised training, pre-training on text, and DPO", "use sft, pt or dpo")
    method = str(values.get("finetuning_type", "lora"))
    if method not in ("lora", "full"):
        conversion.left["finetuning_type"] = "the kit has LoRA and training of all parameters; it uses LoRA"
    draft.set("training.method", "full" if method == "full" else "lora")
    if method != "full":
        _set_lora(conversion)
    if stage == "dpo":
        draft.set("training.objective", "dpo")
        draft.set("dataset.format", "preference")
        if values.get("pref_loss") not in (None, "sigmoid"):
            conversion.left["pref_loss"] = "the kit has DPO's sigmoid loss"
    if stage == "pt":
        draft.set("dataset.format", "text")
        draft.set("dataset.loss_on", "all")
    for key, value in (("learning_rate", 5e-5), ("schedule", "linear"), ("warmup_share", 0.0)):
        draft.default(f"training.{key}", value, "transformers' default")
    draft.default("dataset.max_length", 2048)
    # its default, unless disable_gradient_checkpointing is set
    draft.default("training.activation_checkpointing", "full", "LLaMA-Factory's default")
    training_arguments.set_batch(conversion, "per_device_train_batch_size", 8)
    packed = conversion.is_on("packing") or conversion.is_on("neat_packing")
    packing = "bfd" if packed else "wrapped" if stage == "pt" else "none"
    training_arguments.set_packing(conversion, packing)
    training_arguments.set_validation_share(conversion, "val_size")
    _set_dataset(conversion, stage)
    training_arguments.finish(conversion)


def _set_lora(conversion: Conversion) -> None:
    draft, values = conversion.draft, conversion.values
    draft.default("lora.r", 8, "LLaMA-Factory's default")
    draft.default("lora.alpha", 2 * draft.get("lora.r"), "LLaMA-Factory's default: twice the rank")
    target = values.get("lora_target")
    if target not in _TARGETS_ALL:
        names = target if isinstance(target, list) else [name.strip() for name in str(target).split(",")]
        draft.set("lora.target_modules", names)
    bits = values.get("quantization_bit")
    if bits == 4:
        draft.set("lora.quantization", "nf4")
    elif not is_unset(bits):
        conversion.left["quantization_bit"] = "the kit keeps a frozen model in bf16, or in 4 bits"


def _set_dataset(conversion: Conversion, stage: str) -> None:
    """The first dataset, as dataset_info.json describes it."""
    named = conversion.values.get("dataset")
    names = named if isinstance(named, list) else [name.strip() for name in str(named or "").split(",") if name.strip()]
    if not names:
        return
    if names[1:]:
        conversion.left["dataset"] = "a run has one dataset, the first; concatenate the rows of the others"
    directory = conversion.directory / str(conversion.values.get("dataset_dir") or "data")
    entry = _described(directory / "dataset_info.json", names[0])
    if entry is None:
        conversion.left["dataset"] = "is a name in dataset_info.json, which is not here"
        return
    if hub := entry.get("hf_hub_url"):
        conversion.draft.set("dataset.source", str(hub))
    elif file := entry.get("file_name"):
        conversion.draft.set("dataset.source", str(directory / str(file)))
    if stage == "sft" and (keys := _format(conversion, entry)):
        for key, value in keys.items():
            conversion.draft.default(f"dataset.{key}", value)


def _described(path: Path, name: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(path.read_text(encoding="utf-8")).get(name)
    except (OSError, ValueError, AttributeError):
        return None
    return entry if isinstance(entry, dict) else None


def _format(conversion: Conversion, entry: Mapping[str, Any]) -> dict[str, Any] | None:
    columns = entry.get("columns") or {}
    tags = entry.get("tags") or {}
    if entry.get("formatting", "alpaca") == "sharegpt":
        openai = columns.get("messages") == "messages" and tags.get("role_tag") == "role"
        if not openai:
            conversion.left["dataset"] = (
                "has ShareGPT's conversations; convert each row to messages of role and content"
            )
        return {"format": "chat"} if openai else None
    for key in ("system", "history", "tools", "images"):
        if columns.get(key):
            conversion.left[f"dataset_info.json: {key}"] = "has no counterpart in format alpaca"
    prompt, answer = columns.get("prompt", "instruction"), columns.get("response", "output")
    if (prompt, columns.get("query", "input"), answer) == ("instruction", "input", "output"):
        return {"format": "alpaca"}
    if columns.get("query"):
        conversion.left["dataset_info.json: query"] = "format template can add it: set dataset.prompt_template"
    return template(str(prompt), str(answer))
