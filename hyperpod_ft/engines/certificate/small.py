"""A small config.json from a large one: every kind of layer, and what shapes their behaviour, but small sizes.

A pure function of the values that transformers' class for a config.json holds. Values keep their relations: as many
heads of keys as of queries stay as many, one stays one. Counts, sizes and ranks become those of `_SIZES`; flags,
activations, scales, caps and norms stay; windows become shorter than a document of the certificate's rows. Nothing is
dropped out: packed documents and the same alone would lose other elements.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Values = dict[str, Any]

VOCABULARY = 96
WINDOW = 4
POSITIONS = 128
_HEADS, _FEWER_HEADS, _HEAD_SIZE, _WIDTH = 4, 2, 16, 64
_EXPERTS = 6  # as many as nothing else, since linears with an output for each expert are routers

# By the names that transformers' classes give them. A value is never made larger.
_SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim", "lru_width"), _WIDTH),
    **dict.fromkeys(("embedding_dim",), _WIDTH),
    **dict.fromkeys(("attention_hidden_size",), 2 * _WIDTH),
    **dict.fromkeys(("attention_head_dim", "qk_head_dim"), 2 * _HEAD_SIZE),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 96),
    **dict.fromkeys(
        ("ffn_hidden_size", "intermediate_size_mlp", "dense_intermediate_size", "dim_ff", "dff", "d_inner"), 96
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_ffn_hidden_size", "router_hidden_size"), 32),
    **dict.fromkeys(
        ("head_dim", "kv_channels", "attention_head_size", "swa_head_dim", "v_head_dim", "global_head_dim"), _HEAD_SIZE
    ),
    **dict.fromkeys(("qk_nope_head_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "index_head_dim", "d_head"), _HEAD_SIZE),
    "rotary_dim": 8,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "adapter_rank", "laurel_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), _EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "index_topk"), 2),
    "top_k_experts": 2,
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    **dict.fromkeys(("topk_group", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups", "linear_num_key_heads", "o_groups"), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads", "index_n_heads"), 4),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("num_nextn_predict_layers", "zero_expert_num"), 1),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "attention_window_size"), WINDOW),
    **dict.fromkeys(("attention_chunk_size", "local_attention", "index_block_size"), WINDOW),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "model_max_length"), POSITIONS),
    **dict.fromkeys(("max_target_positions", "context_length", "original_max_position_embeddings"), POSITIONS),
    "block_multiple_of": 8,
    "num_layers_per_stack": 2,
    "max_inference_chunksize": 16,
}
_HEAD_COUNTS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "swa_num_attention_heads"),
    *("decoder_attention_heads", "encoder_attention_heads"),
)
_KEY_HEAD_COUNTS = {
    "num_key_value_heads": "num_attention_heads",
    "num_kv_heads": "num_attention_heads",
    "num_global_key_value_heads": "num_attention_heads",
    "num_query_groups": "num_attention_heads",
    "swa_num_key_value_heads": "swa_num_attention_heads",
}
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "decoder_layers")
# of layers, before which another kind begins
_BORDERS = ("first_k_dense_replace", "num_dense_layers", "max_window_layers", "moe_layer_start_index")
_INDICES = ("mlp_only_layers", "full_attn_idxs", "hybrid_layer_ids", "moe_layers")
_SHARING = "num_kv_shared_layers"  # the last ones, which take keys and values of earlier layers
_BY_LAYER = "per_layer_config"
_REPEATED = ("zamba", "zamba2")  # whose layers of one kind are one, so that two must be left
_PERIODS = ("attn_layer_period", "expert_layer_period", "decoder_sparse_step", "interleave_moe_layer_step")
_OFFSETS = ("attn_layer_offset", "expert_layer_offset")
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}


def small_config(values: Mapping[str, Any]) -> Values:
    """The values of a small model of the same type, from those of a large one (`PretrainedConfig.to_dict()`)."""
    small: Values = {key: _small(key, value, values) for key, value in values.items()}
    _fit_recurrent_heads(small)
    _keep_kinds_of_layers(small, values)
    return small


def _small(key: str, value: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping) and key.endswith("_config"):
        return small_config(value)
    if key in _TOKENS or key.endswith(("_token_id", "_token_index")):
        return value if value is None else _TOKENS.get(key, 2)
    if key in ("rope_parameters", "rope_scaling", "attn_config", "ffn_config") and isinstance(value, Mapping):
        return _small_rope(value, values)
    if isinstance(value, list) and value and key in _SIZES:
        return [_least(_SIZES[key], each) for each in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if isinstance(value, float):
        return 0.0 if "drop" in key or "jitter" in key else value
    if key in _HEAD_COUNTS:
        return min(value, _HEADS)
    if key in _KEY_HEAD_COUNTS:
        whole = values.get(_KEY_HEAD_COUNTS[key]) == value
        return min(value, _HEADS if whole else _FEWER_HEADS)
    if key in _PERIODS:
        return min(value, 2)
    if key in _OFFSETS:
        return min(value, 1)
    return _least(_SIZES[key], value) if key in _SIZES else value


def _least(size: int, value: Any) -> Any:
    return min(size, value) if isinstance(value, int) and not isinstance(value, bool) else value


def _small_rope(rope: Mapping[str, Any], values: Mapping[str, Any]) -> Values:
    """Rotary embeddings whose sections and factors, one for each pair of a head's elements, are fewer."""
    partial = rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    pairs = int(_HEAD_SIZE * float(partial)) // 2
    small: Values = {}
    for key, value in rope.items():
        if isinstance(value, Mapping):
            small[key] = _small_rope(value, values)
        elif key == "mrope_section" and value:
            rest = pairs - (len(value) - 1) * (pairs // len(value))
            small[key] = [pairs // len(value)] * (len(value) - 1) + [rest]
        elif key in ("short_factor", "long_factor") and value:
            small[key] = value[:pairs]
        else:
            small[key] = _small(key, value, values)
    return small


def _fit_recurrent_heads(small: Values) -> None:
    """As many heads of a state space as its width has, which is a multiple of the model's."""
    width = small.get("expand", small.get("mamba_expand"))
    if not isinstance(width, int):
        return
    for heads, size in (("mamba_n_heads", "mamba_d_head"), ("num_heads", "head_dim")):
        if isinstance(small.get(heads), int) and isinstance(small.get(size), int):
            small[heads] = width * small["hidden_size"] // small[size]
    if small.get("mamba_d_ssm"):
        small["mamba_d_ssm"] = width * small["hidden_size"]


def _keep_kinds_of_layers(small: Values, values: Mapping[str, Any]) -> None:
    """Leave the first layer of each kind, two in all if there is only one, and with them what lists say of layers."""
    counts = [key for key in _LAYER_COUNTS if isinstance(values.get(key), int)]
    if not counts:
        return
    count = values[counts[0]]
    indices = {key: value for key in _INDICES if isinstance(value := values.get(key), Sequence)}
    lists = {key: value for key, value in values.items() if key not in indices and _is_of_layers(key, value, count)}
    borders = {key: value for key in _BORDERS if isinstance(value := values.get(key), int)}
    own = {int(layer): value for layer, value in (values.get(_BY_LAYER) or {}).items()}
    shares_from = count - (values.get(_SHARING) or 0)
    kinds = [
        json.dumps(
            [
                *(value[layer] for value in lists.values()),
                *(layer < border for border in borders.values()),
                *(layer in index for index in indices.values()),
                layer < shares_from,
                own.get(layer),
            ],
            default=str,
        )
        for layer in range(count)
    ]
    chosen = _first_of_each(kinds, 2 if values.get("model_type") in _REPEATED else 1)
    if any(values.get(key) not in (1, None) for key in _PERIODS):
        chosen = list(range(min(count, 4)))
    small |= {key: [small[key][layer] for layer in chosen] for key in lists}
    small |= {key: sum(layer < border for layer in chosen) for key, border in borders.items()}
    small |= {key: [new for new, layer in enumerate(chosen) if layer in index] for key, index in indices.items()}
    small |= dict.fromkeys(counts, len(chosen))
    if _SHARING in values:
        small[_SHARING] = sum(layer >= shares_from for layer in chosen)
    if own:
        small[_BY_LAYER] = {new: small_config(own[layer]) for new, layer in enumerate(chosen) if layer in own}


def _is_of_layers(key: str, value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and not key.endswith("_token_id")


def _first_of_each(kinds: Sequence[str], repeated: int) -> list[int]:
    """The numbers of the first layers of each kind, ascending; of the first two layers if there is one kind."""
    chosen = [layer for layer, kind in enumerate(kinds) if kinds[:layer].count(kind) < repeated]
    return chosen if len(chosen) > 1 or len(kinds) < 2 else [*chosen, chosen[0] + 1]
