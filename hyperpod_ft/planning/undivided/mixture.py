"""The parameters of the usual mixtures of experts from config.json, with the names that transformers (5.20) gives them.

A layer has attention and an MLP. The MLP is dense in some layers, and has a router, experts and perhaps shared experts
in the others. What differs between types is a row of `_TYPES`; tests compare each with transformers' own class.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError

from hyperpod_ft.planning.undivided.shape import Parameters, UndividedShape

_Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Type:
    """How the models of one type are built."""

    block: str = "mlp"
    router: str = "gate"
    own_width: bool = False  # experts are as wide as `moe_intermediate_size`, not as dense MLPs
    shared: str = ""  # experts that all tokens pass through
    shared_gate: bool = False
    head_norms: Literal["none", "each", "all"] = "none"
    biases: bool = False  # of queries, keys and values, where `attention_bias` does not say so
    output_bias: bool = True  # if those have one
    expert_biases: bool = False  # and a bias of the router
    sinks: bool = False
    corrected: bool = False  # the router has a correction of its scores that is a parameter
    latent: bool = False  # queries, keys and values have factors of low rank
    gated_attention: bool = False  # and linear attention in most layers
    tied: bool = False
    scored: bool = False  # no kernel computes its attention
    one_a_row: bool = False


_TYPES: Mapping[str, _Type] = {
    "deepseek_v3": _Type(own_width=True, shared="shared_experts", latent=True),
    "ernie4_5_moe": _Type(own_width=True, shared="shared_experts", corrected=True, tied=True),
    "glm4_moe": _Type(own_width=True, shared="shared_experts", output_bias=False),
    "gpt_oss": _Type(router="router", biases=True, expert_biases=True, sinks=True, scored=True, one_a_row=True),
    "granitemoe": _Type(block="block_sparse_moe", router="router"),
    "mixtral": _Type(),
    "olmoe": _Type(head_norms="all"),
    "qwen2_moe": _Type(own_width=True, shared="shared_expert", shared_gate=True, biases=True, output_bias=False),
    "qwen3_moe": _Type(own_width=True, head_norms="each"),
    "qwen3_next": _Type(
        own_width=True,
        shared="shared_expert",
        shared_gate=True,
        head_norms="each",
        gated_attention=True,
        one_a_row=True,
    ),
}


class _Linear(BaseModel):
    """Sizes of linear attention; transformers' defaults."""

    linear_conv_kernel_dim: PositiveInt = 4
    linear_key_head_dim: PositiveInt = 128
    linear_value_head_dim: PositiveInt = 128
    linear_num_key_heads: PositiveInt = 16
    linear_num_value_heads: PositiveInt = 32
    full_attention_interval: PositiveInt = 4
    layer_types: list[str] | None = None


class _Latent(BaseModel):
    q_lora_rank: PositiveInt | None = None
    kv_lora_rank: PositiveInt = 512
    qk_nope_head_dim: PositiveInt = 128
    qk_rope_head_dim: PositiveInt = 64
    v_head_dim: PositiveInt = 128


class _ConfigJson(_Linear, _Latent):
    """The keys of config.json, by their spellings in any type."""

    model_type: str
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    vocab_size: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = Field(None, validation_alias=AliasChoices("attention_bias", "qkv_bias", "use_bias"))
    use_qk_norm: bool = False
    experts: PositiveInt = Field(
        validation_alias=AliasChoices("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    )
    experts_used: PositiveInt = Field(validation_alias=AliasChoices("num_experts_per_tok", "moe_k"))
    moe_intermediate_size: PositiveInt | None = None
    shared_expert_intermediate_size: NonNegativeInt | None = None
    shared_experts: NonNegativeInt = Field(
        0, validation_alias=AliasChoices("n_shared_experts", "moe_num_shared_experts")
    )
    # which layers are dense: the first ones, those listed, and those between every k-th
    dense_layers: NonNegativeInt = Field(
        0, validation_alias=AliasChoices("first_k_dense_replace", "moe_layer_start_index")
    )
    mlp_only_layers: list[int] | None = None
    decoder_sparse_step: PositiveInt = Field(
        1, validation_alias=AliasChoices("decoder_sparse_step", "moe_layer_interval")
    )

    @property
    def sparse_layers(self) -> int:
        """How many layers have experts."""
        listed, step = self.mlp_only_layers or (), self.decoder_sparse_step
        return sum(
            layer >= self.dense_layers and layer not in listed and (layer + 1) % step == 0
            for layer in range(self.num_hidden_layers)
        )

    @property
    def full_layers(self) -> int:
        """How many layers of those with `gated_attention` attend to all before."""
        if self.layer_types:
            return self.layer_types.count("full_attention")
        return self.num_hidden_layers // self.full_attention_interval

    @property
    def key_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads


def mixture_shape(model_config: Mapping[str, Any]) -> UndividedShape | None:
    """The shape that the config.json of a language model describes; None for types without a row, or without sizes."""
    kind = _TYPES.get(str(model_config.get("model_type", "")))
    if kind is None:
        return None
    try:
        values = _ConfigJson.model_validate(model_config)
    except ValidationError:
        return None
    tied = kind.tied if values.tie_word_embeddings is None else values.tie_word_embeddings
    return UndividedShape(
        model_type=values.model_type,
        hidden=values.hidden_size,
        intermediate=values.intermediate_size,
        layers=values.num_hidden_layers,
        heads=values.num_attention_heads,
        kv_heads=values.num_attention_heads if kind.latent else values.key_heads,
        head_dim=_head_dim(kind, values),
        vocabulary=values.vocab_size,
        tied=tied,
        inventory=tuple(_inventory(kind, values, tied)),
        experts=values.experts,
        experts_used=values.experts_used,
        softcap=kind.scored,
        complete=not kind.gated_attention,
        one_a_row=kind.one_a_row,
    )


def _head_dim(kind: _Type, values: _ConfigJson) -> int:
    if kind.latent:
        return values.qk_nope_head_dim + values.qk_rope_head_dim
    return values.head_dim or values.hidden_size // values.num_attention_heads


def _inventory(kind: _Type, values: _ConfigJson, tied: bool) -> Iterator[Parameters]:
    hidden, layers, sparse = values.hidden_size, values.num_hidden_layers, values.sparse_layers
    embedding = (values.vocab_size, hidden)
    yield Parameters("model.embed_tokens.weight", embedding)
    yield Parameters("model.norm.weight", (hidden,))
    if not tied:
        yield Parameters("lm_head.weight", embedding)
    norms: _Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    linear = layers - values.full_layers if kind.gated_attention else 0
    attention = _latent_attention(values) if kind.latent else _attention(kind, values)
    dense = _gated("mlp", hidden, values.intermediate_size)
    parts = ((norms, layers), (attention, layers - linear), (_linear_attention(values), linear))
    for shapes, count in (*parts, (dense, layers - sparse), (_beside_experts(kind, values), sparse)):
        if count:
            yield from (Parameters(f"model.layers.*.{name}", shape, count) for name, shape in shapes.items())
    for name, shape in _experts(kind, values).items():
        yield Parameters(f"model.layers.*.{kind.block}.experts.{name}", shape, sparse, of_experts=True)


def _attention(kind: _Type, values: _ConfigJson) -> _Shapes:
    hidden, size = values.hidden_size, _head_dim(kind, values)
    queries, keys = values.num_attention_heads * size, values.key_heads * size
    # beside each query is what its output is multiplied with
    widths = {"q_proj": queries * (2 if kind.gated_attention else 1), "k_proj": keys, "v_proj": keys}
    found: _Shapes = {f"self_attn.{name}.weight": (width, hidden) for name, width in widths.items()}
    found["self_attn.o_proj.weight"] = (hidden, queries)
    if kind.biases if values.attention_bias is None else values.attention_bias:
        found |= {f"self_attn.{name}.bias": (width,) for name, width in widths.items()}
        if kind.output_bias:
            found["self_attn.o_proj.bias"] = (hidden,)
    if kind.head_norms != "none" or values.use_qk_norm:
        of_all = kind.head_norms == "all"
        found["self_attn.q_norm.weight"] = (queries if of_all else size,)
        found["self_attn.k_norm.weight"] = (keys if of_all else size,)
    if kind.sinks:
        found["self_attn.sinks"] = (values.num_attention_heads,)
    return found


def _latent_attention(values: _ConfigJson) -> _Shapes:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""
    hidden, heads, rank, of_queries = (
        values.hidden_size,
        values.num_attention_heads,
        values.kv_lora_rank,
        values.q_lora_rank,
    )
    queries = heads * (values.qk_nope_head_dim + values.qk_rope_head_dim)
    found: _Shapes = {"q_proj.weight": (queries, hidden)}
    if of_queries:
        found = {
            "q_a_proj.weight": (of_queries, hidden),
            "q_a_layernorm.weight": (of_queries,),
            "q_b_proj.weight": (queries, of_queries),
        }
    found |= {
        "kv_a_proj_with_mqa.weight": (rank + values.qk_rope_head_dim, hidden),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (values.qk_nope_head_dim + values.v_head_dim), rank),
        "o_proj.weight": (hidden, heads * values.v_head_dim),
    }
    if values.attention_bias:
        found |= {"kv_a_proj_with_mqa.bias": (rank + values.qk_rope_head_dim,), "o_proj.bias": (hidden,)}
        found |= {"q_a_proj.bias": (of_queries,)} if of_queries else {}
    return {f"self_attn.{name}": shape for name, shape in found.items()}


def _linear_attention(values: _ConfigJson) -> _Shapes:
    """Gated DeltaNet (arXiv:2412.06464), as in Qwen3-Next."""
    hidden, heads = values.hidden_size, values.linear_num_value_heads
    keys = values.linear_num_key_heads * values.linear_key_head_dim
    width = heads * values.linear_value_head_dim
    found: _Shapes = {
        "dt_bias": (heads,),
        "A_log": (heads,),
        "conv1d.weight": (2 * keys + width, 1, values.linear_conv_kernel_dim),
        "in_proj_qkvz.weight": (2 * keys + 2 * width, hidden),
        "in_proj_ba.weight": (2 * heads, hidden),
        "norm.weight": (values.linear_value_head_dim,),
        "out_proj.weight": (hidden, width),
    }
    return {f"linear_attn.{name}": shape for name, shape in found.items()}


def _gated(path: str, hidden: int, units: int) -> _Shapes:
    return {
        f"{path}.gate_proj.weight": (units, hidden),
        f"{path}.up_proj.weight": (units, hidden),
        f"{path}.down_proj.weight": (hidden, units),
    }


def _beside_experts(kind: _Type, values: _ConfigJson) -> _Shapes:
    """The router and the shared experts, which all tokens pass through."""
    hidden, experts = values.hidden_size, values.experts
    found: _Shapes = {f"{kind.router}.weight": (experts, hidden)}
    if kind.expert_biases:
        found[f"{kind.router}.bias"] = (experts,)
    if kind.corrected:
        found[f"{kind.router}.moe_statics.e_score_correction_bias"] = (1, experts)
    units = values.shared_expert_intermediate_size or values.shared_experts * _expert_units(kind, values)
    if kind.shared and units:
        found |= _gated(kind.shared, hidden, units)
        found |= {f"{kind.shared}_gate.weight": (1, hidden)} if kind.shared_gate else {}
    return {f"{kind.block}.{name}": shape for name, shape in found.items()}


def _experts(kind: _Type, values: _ConfigJson) -> _Shapes:
    experts, hidden, units = values.experts, values.hidden_size, _expert_units(kind, values)
    inputs, outputs = (experts, 2 * units, hidden), (experts, hidden, units)
    if not kind.expert_biases:
        return {"gate_up_proj": inputs, "down_proj": outputs}
    return {
        "gate_up_proj": (experts, hidden, 2 * units),  # transposed, as biased ones are
        "gate_up_proj_bias": (experts, 2 * units),
        "down_proj": (experts, units, hidden),
        "down_proj_bias": (experts, hidden),
    }


def _expert_units(kind: _Type, values: _ConfigJson) -> int:
    return (values.moe_intermediate_size if kind.own_width else None) or values.intermediate_size
