"""TRL's configuration: the file of `trl sft --config` or `trl dpo --config`.

Defaults: trl/trainer/sft_config.py, dpo_config.py and model_config.py of TRL 1, which differ from transformers' own.
"""

from collections.abc import Mapping

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
from hyperpod_ft.authoring.dataset_format import known_on_the_hub

_SPLIT = "dataset.files chooses what is read"
_TOKENIZER = "is taken from the model's own files"
_ONLY_DPO = (
    "beta",
    "precompute_ref_log_probs",
    "max_prompt_length",
    "reference_free",
    "f_divergence_type",
    "rpo_alpha",
)

RULES: Mapping[str, Rule] = {
    **training_arguments.RULES,
    "model_name_or_path": text("model.source"),
    "model_revision": text("model.revision"),
    "dataset_name": text("dataset.source"),
    "datasets": used,
    "dataset_config": left(_SPLIT),
    "dataset_train_split": left(_SPLIT),
    "dataset_test_split": left("validation rows are held out of the training data: set dataset.validation_share"),
    "dataset_streaming": left("the dataset is prepared once, by stage dataset"),
    "dataset_text_field": used,
    "dataset_kwargs": left("has no counterpart"),
    "num_train_epochs": number("training.epochs"),
    "per_device_train_batch_size": used,
    "gradient_accumulation_steps": used,
    "max_length": number("dataset.max_length"),
    "max_seq_length": number("dataset.max_length"),
    "max_prompt_length": left("dataset.max_length counts prompt and answers together"),
    "max_completion_length": left("dataset.max_length counts prompt and answers together"),
    "truncation_mode": left("a row that is too long loses its end"),
    "packing": used,
    "packing_strategy": used,
    "padding_free": left("rows are packed instead (dataset.packing)"),
    "eval_packing": left("validation rows are packed as training rows are"),
    "completion_only_loss": used,
    "assistant_only_loss": used,
    "use_peft": used,
    "lora_r": number("lora.r"),
    "lora_alpha": number("lora.alpha"),
    "lora_dropout": number("lora.dropout"),
    "lora_target_modules": used,
    "lora_modules_to_save": left("the kit trains adapters of linear layers and embeddings: see lora.target_modules"),
    "lora_task_type": left("the kit trains language models"),
    "use_rslora": switch("lora.rslora"),
    "use_dora": switch("lora.dora"),
    "load_in_4bit": used,
    "load_in_8bit": left("the kit keeps a frozen model in bf16, or in 4 bits (lora.quantization: nf4)"),
    "use_bnb_nested_quant": left("the kit's 4 bits have one form"),
    "bnb_4bit_quant_type": left("the kit's 4 bits are nf4"),
    "beta": number("dpo.beta"),
    "loss_type": used,
    "precompute_ref_log_probs": left("the reference is always computed once, before the training"),
    "activation_offloading": switch("training.activation_offload"),
    "dtype": left("a frozen model is in bf16, a trained one in fp32 and bf16 (training.precision)"),
    "torch_dtype": left("a frozen model is in bf16, a trained one in fp32 and bf16 (training.precision)"),
    "chat_template_path": left(_TOKENIZER),
    "eos_token": left(_TOKENIZER),
    "pad_token": left(_TOKENIZER),
    "env": left("export variables in the shell that submits, or set cluster.environment"),
    "accelerate_config": left("degrees and sharding are chosen for the instance type (section parallelism)"),
}


def finish(conversion: Conversion) -> None:
    """What needs more than one key, and TRL's defaults."""
    draft, values = conversion.draft, conversion.values
    lora = conversion.is_on("use_peft")
    draft.set("training.method", "lora" if lora else "full")
    if lora:
        draft.default("lora.dropout", 0.05, "TRL's default")
        draft.default("lora.r", 16, "TRL's default")
        draft.default("lora.alpha", 32, "TRL's default")
        modules = values.get("lora_target_modules")
        if not is_unset(modules) and modules != "all-linear":
            draft.set("lora.target_modules", modules if isinstance(modules, list) else str(modules).split())
        elif modules != "all-linear":
            conversion.left["lora_target_modules"] = "is not set: PEFT adapts some layers, the kit all linear ones"
        if conversion.is_on("load_in_4bit"):
            draft.set("lora.quantization", "nf4")
    _set_dataset(conversion)
    known = known_on_the_hub(str(draft.get("dataset.source")))
    preferences = known is not None and known.keys["format"] == "preference"
    dpo = preferences or any(key in values for key in _ONLY_DPO) or values.get("loss_type") == "sigmoid"
    if dpo:
        draft.set("training.objective", "dpo")
        draft.set("dataset.format", "preference")
    if values.get("loss_type") not in (None, "nll", "chunked_nll", "sigmoid", ["sigmoid"]):
        conversion.left["loss_type"] = "the kit has DPO's sigmoid loss and the cross entropy"
    draft.default("training.learning_rate", 1e-6 if dpo else 2e-5, "TRL's default")
    draft.default("training.schedule", "linear", "TRL's default")
    draft.default("training.warmup_share", 0.0, "TRL's default")
    draft.default("dataset.max_length", 1024, "TRL's default")
    draft.default("dataset.validation_share", 0.0, "TRL holds out no rows")
    if "gradient_checkpointing" not in values:
        draft.set("training.activation_checkpointing", "full", "TRL's default")
    training_arguments.set_batch(conversion, "per_device_train_batch_size", 8)
    packed = {"wrapped": "wrapped"}.get(str(values.get("packing_strategy")), "bfd")
    training_arguments.set_packing(conversion, packed if conversion.is_on("packing") else "none")
    if not dpo:
        _set_loss(conversion)
    training_arguments.finish(conversion)


def _set_dataset(conversion: Conversion) -> None:
    mixture = conversion.values.get("datasets")
    if isinstance(mixture, list) and mixture and isinstance(mixture[0], dict):
        conversion.draft.set("dataset.source", str(mixture[0].get("path", "")))
        for key in mixture[0].keys() - {"path"}:
            conversion.left[f"datasets[0].{key}"] = _SPLIT
        for index in range(1, len(mixture)):
            conversion.left[f"datasets[{index}]"] = "a run has one dataset; concatenate their rows"
    elif not is_unset(mixture):
        conversion.left["datasets"] = "is not a list of datasets"
    field = conversion.values.get("dataset_text_field")
    if field == "text":
        conversion.draft.set("dataset.format", "text")
    elif not is_unset(field):
        conversion.draft.set("dataset.format", "template")
        conversion.draft.set("dataset.completion_template", f"{{{{ {field} }}}}")


def _set_loss(conversion: Conversion) -> None:
    """By default TRL trains on all of a conversation, and on the completion alone of a prompt and completion."""
    for key in ("completion_only_loss", "assistant_only_loss"):
        if key in conversion.values:
            conversion.draft.set("dataset.loss_on", "completion" if conversion.is_on(key) else "all")


def finish_with_format(conversion: Conversion) -> None:
    """The part of the conversion that the dataset's format decides."""
    if conversion.draft.get("dataset.format") == "chat":
        conversion.draft.default("dataset.loss_on", "all", "TRL's default: of a chat, every token counts")
