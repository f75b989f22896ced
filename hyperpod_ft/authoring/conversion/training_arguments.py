"""Keys that transformers' TrainingArguments give to TRL and LLaMA-Factory, and partly to axolotl."""

import math
from collections.abc import Mapping

from hyperpod_ft.authoring.conversion.foreign_file import Conversion, Rule, changes, choice, number, switch, used
from hyperpod_ft.planning.trl.settings import least_rows

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
            conversion.housekeeping[key] = f"is a share of all steps; the kit counts them: set training.{to}"
        else:
            conversion.draft.set(f"training.{to}", int(value))

    return rule


def _max_steps(conversion: Conversion, key: str) -> None:
    if conversion.number(key) > 0:
        conversion.draft.set("training.max_steps", conversion.number(key))


def _half(conversion: Conversion, key: str) -> None:
    if conversion.is_on(key):
        conversion.changes[key] = "the kit computes in bf16 or fp32; the run uses bf16"


def _bf16(conversion: Conversion, key: str) -> None:
    value = conversion.values[key]
    if conversion.is_on(key) or value in ("auto", "full"):
        conversion.draft.set("training.precision", "bf16")


def _evaluation_steps(conversion: Conversion, key: str) -> None:
    strategy = conversion.values.get("eval_strategy", conversion.values.get("evaluation_strategy", "steps"))
    if strategy == "steps":
        _steps("validate_every_steps")(conversion, key)
    else:
        conversion.housekeeping[key] = "is used only with eval_strategy: steps"


def _strategy(to: str) -> Rule:
    def rule(conversion: Conversion, key: str) -> None:
        if str(conversion.values[key]) not in ("steps", "no"):
            conversion.housekeeping[key] = f"the kit counts steps: set training.{to}"

    return rule


# keys that another rule, or `finish`, reads
_READ_ELSEWHERE = "gradient_accumulation_steps warmup_steps do_train do_eval load_best_model_at_end"
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_READ_ELSEWHERE.split(), used),
    "learning_rate": number("training.learning_rate"),
    "weight_decay": number("training.weight_decay"),
    "adam_beta1": number("training.adam_beta1"),
    "adam_beta2": number("training.adam_beta2"),
    "max_grad_norm": number("training.max_grad_norm"),
    "max_steps": _max_steps,
    "warmup_ratio": number("training.warmup_share"),
    "optim": choice("training.optimizer_state", OPTIMIZERS, "the kit's optimizer is AdamW, and the run uses it"),
    "lr_scheduler_type": choice(
        "training.schedule", _SCHEDULES, "the kit has cosine, linear and constant: see training.schedule"
    ),
    "neftune_noise_alpha": number("trl.neftune_noise_alpha"),
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
    "gradient_checkpointing": switch("training.activation_checkpointing", "full"),
    "torch_compile": switch("training.compile"),
    "load_in_8bit": changes("the kit keeps a frozen model in bf16, or in 4 bits (lora.quantization: nf4)"),
    "group_by_length": changes("rows are shuffled whatever their length"),
    "dataloader_drop_last": changes("no rows are dropped: epochs follow one another without a gap"),
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
            conversion.changes["load_best_model_at_end"] = "needs training.validate_every_steps; set keep_best with it"


def _set_warmup(conversion: Conversion) -> None:
    """transformers prefers warmup_steps to warmup_ratio; below 1 it is a share of all steps too."""
    if "constant" in (conversion.values.get("lr_scheduler_type"), conversion.values.get("lr_scheduler")):
        conversion.draft.set("training.warmup_share", 0.0, "constant has none in transformers")
        return
    warmup, steps = conversion.number("warmup_steps", 0), conversion.number("max_steps", 0)
    if 0 < warmup < 1:
        conversion.draft.set("training.warmup_share", warmup)
    elif warmup and steps > 0:
        # rounded down, since the kit rounds share * steps up
        share = min(1.0, math.floor(warmup / steps * 1e6) / 1e6)
        conversion.draft.set("training.warmup_share", share, "warmup_steps / max_steps")
    elif warmup:
        conversion.changes["warmup_steps"] = (
            "the kit has a share of all steps, whose number `hyperpod-ft plan` shows once the dataset is prepared: set"
            " training.warmup_share"
        )


def set_batch(conversion: Conversion, objective: str, micro_key: str, default: int) -> None:
    """The batch of a device, which stays the same on other instances as far as their memory allows."""
    least = least_rows(objective, conversion.draft.values.get("trl", {}))
    micro, accumulated = conversion.number(micro_key, default), conversion.number("gradient_accumulation_steps", 1)
    if micro < least:
        rows = micro * accumulated
        micro, accumulated = least, math.ceil(rows / least)
        becomes = f"a step has {micro * accumulated} rows of each device" if rows % least else "fewer are accumulated"
        conversion.changes[micro_key] = f"a forward pass needs {least} rows, which are compared; {becomes}"
    conversion.draft.set("training.micro_batch_size", micro)
    conversion.draft.set("training.gradient_accumulation_steps", accumulated)


def set_validation_share(conversion: Conversion, key: str) -> None:
    """The share of rows held out, where `key` may be a number of rows too. None are by default."""
    share = conversion.number(key, 0)
    if share >= 1:
        share = _VALIDATION_SHARE
        conversion.changes[key] = f"is a number of rows; the kit holds out a share, {share} of them"
    conversion.draft.set("dataset.validation_share", share)


def set_packing(conversion: Conversion, packing: str, overlong: str = "truncate") -> None:
    """The packing of the tool: without it, a row has one example and is padded, as there."""
    note = "one example a row, as before; auto packs several, which trains faster" if packing == "none" else ""
    conversion.draft.set("dataset.packing", packing, note)
    conversion.draft.set("dataset.overlong", overlong)
