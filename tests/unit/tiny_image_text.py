"""Tiny image-text models: a language model of a known type, and a tower that reads images."""

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from tests.unit.tiny_families import SIZES

_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "depth": 2,
    "num_heads": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "out_hidden_size": SIZES["hidden_size"],
    "num_position_embeddings": 16,
}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_DELTA |= {"layer_types": ["linear_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GEMMA = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
# what each type's language model needs besides
TYPES: dict[str, dict[str, Any]] = {
    "qwen3_5": _DELTA,
    "qwen3_5_moe": _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 16},
    "gemma3": _GEMMA | {"query_pre_attn_scalar": 8},
    "gemma4": _GEMMA
    | {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "global_head_dim": 8}
    | {"vocab_size_per_layer_input": SIZES["vocab_size"]},
    "mistral3": {"tie_word_embeddings": False},
    "internvl": {"tie_word_embeddings": False},
    "llava": {"tie_word_embeddings": False},
}


def config_of(model_type: str, **sizes: Any) -> PretrainedConfig:
    """`sizes`: of the language model."""
    usual = AutoConfig.for_model(model_type)
    values = SIZES | TYPES[model_type] | sizes
    if "vocab_size_per_layer_input" in values:
        values["vocab_size_per_layer_input"] = values["vocab_size"]
    parts = {"text_config": type(usual.text_config)(**values).to_dict()}
    if usual.vision_config is not None:
        tower = {name: value for name, value in _TOWER.items() if hasattr(usual.vision_config, name)}
        parts["vision_config"] = type(usual.vision_config)(**tower).to_dict()
    found = AutoConfig.for_model(model_type, **parts)
    if values.get("tie_word_embeddings") is False:
        found.tie_word_embeddings = False
    return found
