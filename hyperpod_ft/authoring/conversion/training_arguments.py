"""Keys that transformers' TrainingArguments give to TRL and LLaMA-Factory, and partly to axolotl."""

import math
from collections.abc import Mapping

from hyperpod_ft.authoring.conversion.foreign_file import Conversion, Rule, choice, left, number, switch, used

_ATTENTION = "engine torch chooses its own attention kernel"
_OWN_LAYOUT = "degrees and sharding are chosen for the instance type (section parallelism)"
METRICS = "metrics are in metrics.jsonl of the run; to publish them too, set tracking.trackers"
_HUB = "a run does not upload its model; `hyperpod-ft push` does"
_WHERE = "a run is kept below cluster.root, by its name"
_NODES = "the number of ranks follows from cluster.instance_type and nodes"
_WORKERS = "the kit chooses the number of processes that read data (dataset.workers)"

_VALIDATION_SHARE = 0.02  # where the other file gives none

# what makes an optimizer AdamW, by the way it keeps its moments
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw", "adamw_apex_fused"), "fp32"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), "int8"),
    "paged_adamw_32bit": "fp32",
}
_SCHEDULES = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}


def _steps(to: str) -> Rule:
    """A number of steps; transformers also takes a share of all steps."""

    def rule(conversion: Conversion, key: str) -> None:
        value = conversion.number(key)
        if value < 1:
            conversion.left[key] = f"is a share of all steps; the kit counts them: set training.{to}"
        else:
            conversion.draft.set(f"training.{to}", int(value))

    return rule


def _max_steps(conversion: Conversion, key: str) -> None:
    if conversion.number(key) > 0:
        conversion.draft.set("training.max_steps", conversion.number(key))


def _half(conversion: Conversion, key: str) -> None:
    if conversion.is_on(key):
        conversion.left[key] = "the kit computes in bf16 or fp32; it uses bf16"


def _bf16(conversion: Conversion, key: str) -> None:
    value = conversion.values[key]
    if conversion.is_on(key) or value in ("auto", "full"):
        conversion.draft.set("training.precision", "bf16")


def _evaluation_steps(conversion: Conversion, key: str) -> None:
    strategy = conversion.values.get("eval_strategy", conversion.values.get("evaluation_strategy", "steps"))
    if strategy == "steps":
        _steps("validate_every_steps")(conversion, key)
    else:
        conversion.left[key] = "is used only with eval_strategy: steps"


def _strategy(to: str) -> Rule:
    def rule(conversion: Conversion, key: str) -> None:
        if str(conversion.values[key]) not in ("steps", "no"):
            conversion.left[key] = f"the kit counts steps: set training.{to}"

    return rule


RULES: Mapping[str, Rule] = {
    "learning_rate": number("training.learning_rate"),
    "weight_decay": number("training.weight_decay"),
    "adam_beta1": number("training.adam_beta1"),
    "adam_beta2": number("training.adam_beta2"),
    "max_grad_norm": number("training.max_grad_norm"),
    "max_steps": _max_steps,
    "warmup_ratio": number("training.warmup_share"),
    "warmup_steps": used,
    "optim": choice("training.optimizer_state", OPTIMIZERS, "the kit's optimizer is AdamW"),
    "lr_scheduler_type": choice(
        "training.schedule", _SCHEDULES, "the kit has cosine, linear and constant: set training.schedule"
    ),
    "bf16": _bf16,
    "fp16": _half,
    "seed": number("seed"),
    "logging_steps": _steps("log_every_steps"),
    "save_steps": _steps("save_every_steps"),
    "save_strategy": _strategy("save_every_steps"),
    "save_total_limit": number("training.keep_checkpoints"),
    "eval_steps": _evaluation_steps,
    "eval_strategy": _strategy("validate_every_steps"),
    "evaluation_strategy": _strategy("validate_every_steps"),
    "load_best_model_at_end": used,
    "gradient_checkpointing": switch("training.activation_checkpointing", "full"),
    "gradient_checkpointing_kwargs": left("the kit's activation checkpointing has no options"),
    "save_only_model": left("the kit's checkpoints can be resumed from; save_only_model saves once, at the end"),
    "data_seed": left("one seed is for everything"),
    "tf32": left("the kit computes in bf16 or fp32"),
    "group_by_length": left("rows are packed instead (dataset.packing)"),
    "resume_from_checkpoint": left("`hyperpod-ft resume` continues a run"),
    "output_dir": left(_WHERE),
    "overwrite_output_dir": left(_WHERE),
    "run_name": left(_WHERE),
    "report_to": left(METRICS),
    "logging_dir": left(METRICS),
    "push_to_hub": left(_HUB),
    "hub_model_id": left(_HUB),
    "hub_strategy": left(_HUB),
    "deepspeed": left(_OWN_LAYOUT),
    "fsdp": left(_OWN_LAYOUT),
    "fsdp_config": left(_OWN_LAYOUT),
    "ddp_timeout": left("the kit sets the timeouts of its process groups"),
    "ddp_find_unused_parameters": left(_OWN_LAYOUT),
    "dataloader_num_workers": left(_WORKERS),
    "dataloader_pin_memory": left(_WORKERS),
    "dataset_num_proc": left(_WORKERS),
    "remove_unused_columns": left("the dataset's format says which fields are used"),
    "torch_compile": switch("training.compile"),
    "flash_attention": left(_ATTENTION),
    "flash_attn": left(_ATTENTION),
    "attn_implementation": left(_ATTENTION),
    "trust_remote_code": left("the kit runs no code of a model"),
    "num_processes": left(_NODES),
    "num_machines": left(_NODES),
    "do_train": used,
    "do_eval": used,
    "per_device_eval_batch_size": left("validation uses training.micro_batch_size"),
    "eval_accumulation_steps": left("validation uses training.micro_batch_size"),
    "neftune_noise_alpha": left("the kit adds no noise to embeddings"),
    "label_smoothing_factor": left("the kit has no label smoothing"),
    "use_liger_kernel": left("engine torch has kernels of its own for the loss and norms"),
}


def finish(conversion: Conversion) -> None:
    """What needs more than one key of these."""
    draft = conversion.draft
    if "bf16" in conversion.values and not draft.get("training.precision") and not conversion.is_on("fp16"):
        draft.set("training.precision", "fp32", "bf16 was off")
    _set_warmup(conversion)
    evaluates = draft.get("training.validate_every_steps")
    if evaluates and not draft.get("dataset.validation_share"):
        draft.set("dataset.validation_share", _VALIDATION_SHARE, "rows held out for the validation loss")
    if conversion.is_on("load_best_model_at_end"):
        if evaluates:
            draft.set("training.keep_best", True)
        else:
            conversion.left["load_best_model_at_end"] = "needs training.validate_every_steps; set keep_best with it"


def _set_warmup(conversion: Conversion) -> None:
    """transformers prefers warmup_steps to warmup_ratio; below 1 it is a share of all steps too."""
    warmup, steps = conversion.number("warmup_steps", 0), conversion.number("max_steps", 0)
    if 0 < warmup < 1:
        conversion.draft.set("training.warmup_share", warmup)
    elif warmup and steps > 0:
        # rounded down, since the kit rounds share * steps up
        share = min(1.0, math.floor(warmup / steps * 1e6) / 1e6)
        conversion.draft.set("training.warmup_share", share, "warmup_steps / max_steps")
    elif warmup:
        conversion.left["warmup_steps"] = (
            "the kit has a share of all steps, whose number `hyperpod-ft plan` shows once the dataset is prepared: set"
            " training.warmup_share"
        )


def set_batch(conversion: Conversion, micro_key: str, default: int) -> None:
    """The batch of a device, which stays the same on other instances as far as their memory allows."""
    micro = conversion.number(micro_key, default)
    conversion.draft.set("training.micro_batch_size", micro)
    accumulated = conversion.number("gradient_accumulation_steps", 1)
    conversion.draft.set("training.gradient_accumulation_steps", accumulated)


def set_validation_share(conversion: Conversion, key: str) -> None:
    """The share of rows held out, where `key` may be a number of rows too. None are by default."""
    share = conversion.number(key, 0)
    if share >= 1:
        share = _VALIDATION_SHARE
        conversion.left[key] = f"is a number of rows; the kit holds out a share, {share} of them"
    conversion.draft.set("dataset.validation_share", share)


def set_packing(conversion: Conversion, packing: str) -> None:
    """The packing of the tool: without it, a row has one example and is padded, as there."""
    note = "one example a row, as before; bfd packs several, which trains faster" if packing == "none" else ""
    conversion.draft.set("dataset.packing", packing, note)
    conversion.draft.set("dataset.overlong", "truncate")
