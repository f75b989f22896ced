"""The settings of TRL's trainers that a run file may give: those that it has no key of its own for.

Names are those of TRL 1.16's config classes; a test compares them. Of its other settings, some are keys elsewhere in a
run file, and the rest are the kit's: where data come from, and what is written, logged and published.
"""

import difflib
import math
from collections.abc import Mapping
from typing import Any

from hyperpod_ft.checkpoint.formats.model_directory import EMBEDDINGS
from hyperpod_ft.config.fields import shown
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sections.training import last_parts
from hyperpod_ft.errors import UserError

Values = type | tuple[str, ...] | list["Values"] | Mapping[str, "Values"]
"""What a setting may be: of a type, one of some names, a list of such values, or a mapping of names to them."""

_OF_MODEL = "attn_implementation"
# The modules that each needs.
ATTENTION: Mapping[str, tuple[str, ...]] = {
    "eager": (),
    "sdpa": (),
    "flex_attention": (),
    "flash_attention_2": ("flash_attn",),
    "flash_attention_3": ("flash_attn_interface",),
}

# Of any trainer. Other optimizers need packages that its environment does not have.
_COMMON: Mapping[str, Values] = {
    "adam_epsilon": float,
    "dataloader_num_workers": int,
    "ddp_bucket_cap_mb": int,
    "ddp_static_graph": bool,
    "model_init_kwargs": {_OF_MODEL: (*ATTENTION,)},
    "neftune_noise_alpha": float,
    "optim": ("adamw_torch_fused", "adamw_torch", "adafactor", "adagrad", "rmsprop", "sgd"),
    "tf32": bool,
    "torch_compile": bool,
    "torch_compile_mode": ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    "torch_empty_cache_steps": int,
}
# Those that need dpo.label_smoothing are left out.
PREFERENCE_LOSSES = (
    *("sigmoid", "sigmoid_norm", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard"),
    *("aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft"),
)
# Those that sort pairs, and others that are no function of the difference of a pair's log-probabilities.
_SORTED = ("aot", "aot_unpaired")
_NO_DIFFERENCE = (*_SORTED, "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")
# Of transformers' GenerationConfig, what no other setting or key says: TRL would put these in place of them.
_GENERATION: Mapping[str, Values] = {
    "bad_words_ids": list,
    "epsilon_cutoff": float,
    "eta_cutoff": float,
    "no_repeat_ngram_size": int,
    "suppress_tokens": list,
    "typical_p": float,
}
# Of any trainer that samples answers. With neftune_noise_alpha, it would sample with noise.
_SAMPLED: Mapping[str, Values] = {
    **{name: kind for name, kind in _COMMON.items() if name != "neftune_noise_alpha"},
    "disable_dropout": bool,
    "generation_kwargs": _GENERATION,
    "min_p": float,
    "repetition_penalty": float,
    "top_k": int,
    "top_p": float,
    "use_vllm": bool,
    "vllm_gpu_memory_utilization": float,
}
# Not steps_per_generation, generation_batch_size and num_iterations: with them, answers outlive a step, and a restart
# would sample others.
_REWARDED: Mapping[str, Values] = {"epsilon": float, "epsilon_high": float, "mask_truncated_completions": bool}
SETTINGS: Mapping[str, Mapping[str, Values]] = {
    "sft": {**_COMMON, "loss_type": ("nll", "dft")},
    "dpo": {
        **_COMMON,
        "discopop_tau": float,
        "f_alpha_divergence_coef": float,
        "f_divergence_type": ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"),
        "ld_alpha": float,
        "loss_type": [PREFERENCE_LOSSES],
        "loss_weights": [float],
        "use_weighting": bool,
    },
    "reward": {**_COMMON, "center_rewards_coefficient": float},
    "kto": {**_COMMON, "loss_type": ("kto", "apo_zero_unpaired")},
    "grpo": {
        **_SAMPLED,
        **_REWARDED,
        "cast_lm_head_to_fp32": bool,
        "delta": float,
        "entropy_coef": float,
        "importance_sampling_level": ("token", "sequence"),
        "loss_type": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
        "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
        "scale_rewards": ("group", "batch", "none"),
        "top_entropy_quantile": float,
    },
    "rloo": {**_SAMPLED, **_REWARDED, "normalize_advantages": bool},
    "distillation": _SAMPLED,
}
"""By the run's objective."""

_OF_TRAINING = (
    *("adam_beta1", "adam_beta2", "gradient_accumulation_steps", "learning_rate", "max_grad_norm", "max_steps"),
    *("save_only_model", "weight_decay"),
)
ELSEWHERE: dict[str, str] = {
    **{name: f"training.{name}" for name in _OF_TRAINING},
    **dict.fromkeys(("assistant_only_loss", "completion_only_loss"), "dataset.loss_on"),
    "beta": "dpo.beta",
    **dict.fromkeys(("bf16", "fp16"), "training.precision"),
    "dataset_num_proc": "dataset.workers",
    "desirable_weight": "kto.desirable_weight",
    "eval_steps": "training.validate_every_steps",
    **dict.fromkeys(("gradient_checkpointing", "gradient_checkpointing_kwargs"), "training.activation_checkpointing"),
    "label_smoothing": "dpo.label_smoothing",
    "load_best_model_at_end": "training.keep_best",
    "logging_steps": "training.log_every_steps",
    **dict.fromkeys(("lr_scheduler_kwargs", "lr_scheduler_type"), "training.schedule"),
    "max_length": "dataset.max_length",
    "max_completion_length": "sampling.max_completion_length",
    "num_generations": "sampling.generations",
    "num_train_epochs": "training.epochs",
    **dict.fromkeys(("packing", "packing_strategy"), "dataset.packing"),
    "per_device_train_batch_size": "training.micro_batch_size",
    "report_to": "tracking.trackers",
    "reward_weights": "reward.0.weight",
    "save_steps": "training.save_every_steps",
    "save_total_limit": "training.keep_checkpoints",
    **dict.fromkeys(("seed", "shuffle_dataset"), "seed"),
    "temperature": "sampling.temperature",
    "undesirable_weight": "kto.undesirable_weight",
    "warmup_steps": "training.warmup_share",
}
"""Settings of TRL that are keys of a run file."""
_OF_OBJECTIVE: Mapping[str, dict[str, str]] = {
    "kto": {"beta": "kto.beta"},
    **{name: {"beta": "sampling.beta"} for name in ("grpo", "rloo")},
    "distillation": {"beta": "teacher.beta"},
}


def attention(config: RunConfig) -> str:
    """The attention implementation, by transformers' name: of those without further packages, one that packs well.

    On GPUs flex attention skips what documents do not see. Where the embedding is trained, in fp32, queries and keys
    are too, which autocast evens out for SDPA, but not for flex attention. Answers are sampled with SDPA too, one a
    row, and the towers that read images have it. On CPUs a mask separates documents, and SDPA would leave out the soft
    cap of some types.
    """
    if named := config.trl.get("model_init_kwargs"):
        return str(named[_OF_MODEL])
    if not config.instance.has_accelerators:
        return "eager"
    whole = config.training.method == "full" or last_parts(config.lora.modules_to_save) & {*EMBEDDINGS}
    fp32_queries = whole and config.training.precision == "bf16"
    needs_sdpa = fp32_queries or config.training.samples_answers or config.dataset.images
    return "sdpa" if needs_sdpa else "flex_attention"


def least_rows(objective: str, given: Mapping[str, Any]) -> int:
    """The least rows of a forward pass; `given`: section trl.

    KTO's estimate of the KL divergence takes each completion of a forward pass with the prompt of another one.
    """
    return 2 if objective == "kto" and given.get("loss_type") != "apo_zero_unpaired" else 1


def has_reference(config: RunConfig) -> bool:
    """Whether the model before training is kept beside the one that is trained: adapters can be left out instead."""
    objective = config.training.objective
    compared = objective in ("dpo", "kto") or (config.training.has_rewards and config.sampling.beta > 0)
    return compared and config.training.method == "full"


def has_fp32_weights(config: RunConfig) -> bool:
    """Whether all weights are kept in fp32, not only those that are trained.

    For vLLM, TRL adds adapters to the weights and subtracts them again before each step. In bf16, that would round the
    weights every time: after 200 steps, they would differ by a fifth of what the adapters add.
    """
    return config.training.method == "full" or config.vllm_share > 0


def unsharded(config: RunConfig) -> str:
    """Why FSDP2 does not shard the run; empty where it does."""
    if config.dataset.images:
        return "has not been tried with dataset.images"
    if config.vllm_share:
        return "has not been tried with trl.use_vllm"
    # of a label that it has no rows of, TRL's rank gathers fp32, and the others what FSDP2 computes in
    if config.training.objective == "kto" and config.training.precision == "bf16":
        return "in bf16, TRL's KTO fails where all rows of a rank have one label"
    return ""


def check(objective: str, given: Mapping[str, Any]) -> None:
    """Raise UserError for an entry of section `trl` that the objective's trainer does not have, or of another type."""
    if "vllm_mode" in given:
        raise UserError("trl: vllm_mode is not supported; with use_vllm, vLLM runs in every rank", "remove it")
    elsewhere = ELSEWHERE | _OF_OBJECTIVE.get(objective, {})
    _check_names("trl", given, SETTINGS[objective], elsewhere)
    weights, losses = given.get("loss_weights"), given.get("loss_type", ["sigmoid"])
    if weights is not None and len(weights) != len(losses):
        raise UserError(f"trl: loss_weights has {len(weights)} numbers for {len(losses)} losses", "give each one")
    diverges = given.get("f_divergence_type", "reverse_kl") != "reverse_kl"
    for name, used, without in (
        ("f_divergence_type", diverges, _NO_DIFFERENCE),
        ("use_weighting", given.get("use_weighting"), _SORTED),
    ):
        if used and (found := [loss for loss in losses if loss in without]):
            raise UserError(f"trl: TRL has no {name} for loss_type {found[0]}", "remove one of them")


def _check_names(
    where: str, given: Mapping[str, Any], known: Mapping[str, Values], elsewhere: Mapping[str, str]
) -> None:
    for name, value in given.items():
        if name in elsewhere:
            key = elsewhere[name]
            raise UserError(f"{where}: {name} is {key} in a run file", f"set {key} instead")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise UserError(
                f"{where}: {shown(name)} is not one of the settings of TRL that a run file may give",
                f"did you mean {close[0]}?" if close else f"remove it; they are {', '.join(known)}",
            )
        _check_value(f"{where}: {name}", value, known[name], elsewhere)


def _check_value(where: str, value: Any, wanted: Values, elsewhere: Mapping[str, str]) -> None:
    if isinstance(wanted, tuple):
        if value not in wanted:
            raise UserError(f"{where} is {shown(value)}", f"set it to one of {', '.join(wanted)}")
        return
    kind = wanted if isinstance(wanted, type) else list if isinstance(wanted, list) else dict
    allowed: Any = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{where} is {shown(value)}, not of type {kind.__name__}", "correct it")
    if kind is float and not abs(value) < math.inf:
        raise UserError(f"{where} is {shown(value)}", "set it to a finite number")
    if isinstance(wanted, list):
        if not value:
            raise UserError(f"{where} is empty", "remove it")
        for each in value:
            _check_value(where, each, wanted[0], elsewhere)
    if isinstance(wanted, Mapping):
        _check_names(where, value, wanted, elsewhere)
