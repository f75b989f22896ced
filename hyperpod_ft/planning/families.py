"""Families of models, as engine torch knows them, by config.json's model_type.

One row for each that it can divide: the names of its modules, and what divides with what. A family that has no row
trains with tensor_parallel 1 and without a pipeline. Paths of modules are transformers' (5.20), since the engine runs
its classes.

A layer has two blocks, attention and MLP. A block's first linears are divided by outputs (`columns`), its last by
inputs (`rows`): each head and each unit of the MLP is then on one rank, and a block needs one sum over the ranks. The
outputs of a fused linear are parts, one after another; each is divided by itself. A bias is divided like the outputs;
that of a row is added once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# What a part of a linear's outputs is: heads of queries; heads of keys or values; heads, each with its query, key and
# value side by side; units of the MLP.
Outputs = Literal["queries", "keys", "triples", "units"]
Biased = Literal["columns", "output", "mlp", "norms", "head"]


@dataclass(frozen=True)
class Family:
    """How the models of one family are built. Paths of linears begin at a layer, others at the model."""

    model_types: tuple[str, ...]
    columns: Mapping[str, tuple[Outputs, ...]]
    rows: tuple[str, ...]
    attention: str = "self_attn"
    mlp: str = "mlp"
    embedding: str = "model.embed_tokens"
    positions: str | None = None  # the embedding of positions, where they are learned
    layers: str = "model.layers"
    last_norm: str = "model.norm"
    head: str = "lm_head"
    transposed: bool = False  # weights are [inputs, outputs] (transformers' Conv1D)
    # A norm of queries and one of keys (`q_norm`, `k_norm` of attention): of each head, or of all heads together.
    head_norms: Literal["none", "each", "all"] = "none"
    # What transformers' attention reads besides the weights: attributes proportional to the rank's query or key heads.
    query_attributes: tuple[str, ...] = ()
    key_attributes: tuple[str, ...] = ()
    # What config.json leaves out: whether input and output embeddings are one matrix, and what has biases, where
    # `attention_bias` and `mlp_bias` do not say so. `columns`: of attention; `output`: its last linear.
    tied: bool = False
    biases: frozenset[Biased] = frozenset()
    norms: int = 2  # of a layer, at the model's width
    wide_norms: bool = False  # of a different form, which keeps input and normalized tensor in fp32
    shared_input: str | None = None  # the module whose output both attention and MLP take in, if it is one
    # Usual name to the one in config.json, where they differ; transformers' `attribute_map`.
    attribute_map: Mapping[str, str] = field(default_factory=dict)


_LLAMA_COLUMNS: Mapping[str, tuple[Outputs, ...]] = {
    "self_attn.q_proj": ("queries",),
    "self_attn.k_proj": ("keys",),
    "self_attn.v_proj": ("keys",),
    "mlp.gate_proj": ("units",),
    "mlp.up_proj": ("units",),
}
_LLAMA_ROWS = ("self_attn.o_proj", "mlp.down_proj")
_GPT2_ATTRIBUTES: Mapping[str, str] = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
}

FAMILIES: tuple[Family, ...] = (
    Family(("llama", "mistral", "granite"), _LLAMA_COLUMNS, _LLAMA_ROWS),
    Family(("qwen2",), _LLAMA_COLUMNS, _LLAMA_ROWS, biases=frozenset({"columns"})),
    Family(("smollm3",), _LLAMA_COLUMNS, _LLAMA_ROWS, tied=True),
    Family(("gemma2",), _LLAMA_COLUMNS, _LLAMA_ROWS, tied=True, norms=4, wide_norms=True),
    Family(("gemma3_text",), _LLAMA_COLUMNS, _LLAMA_ROWS, head_norms="each", tied=True, norms=4, wide_norms=True),
    Family(("qwen3",), _LLAMA_COLUMNS, _LLAMA_ROWS, head_norms="each"),
    Family(("olmo2",), _LLAMA_COLUMNS, _LLAMA_ROWS, head_norms="all"),
    Family(
        ("phi3",),
        columns={"self_attn.qkv_proj": ("queries", "keys", "keys"), "mlp.gate_up_proj": ("units", "units")},
        rows=_LLAMA_ROWS,
        query_attributes=("config.num_attention_heads",),
        key_attributes=("num_key_value_heads",),
    ),
    Family(
        ("gpt_neox",),
        columns={"attention.query_key_value": ("triples",), "mlp.dense_h_to_4h": ("units",)},
        rows=("attention.dense", "mlp.dense_4h_to_h"),
        attention="attention",
        embedding="gpt_neox.embed_in",
        layers="gpt_neox.layers",
        last_norm="gpt_neox.final_layer_norm",
        biases=frozenset({"columns", "output", "mlp", "norms"}),
    ),
    Family(
        ("gpt2",),
        columns={"attn.c_attn": ("queries", "keys", "keys"), "mlp.c_fc": ("units",)},
        rows=("attn.c_proj", "mlp.c_proj"),
        attention="attn",
        embedding="transformer.wte",
        positions="transformer.wpe",
        layers="transformer.h",
        last_norm="transformer.ln_f",
        transposed=True,
        query_attributes=("split_size", "num_heads"),
        tied=True,
        biases=frozenset({"columns", "output", "mlp", "norms"}),
        attribute_map={**_GPT2_ATTRIBUTES, "max_position_embeddings": "n_positions"},
    ),
    Family(
        ("gptj",),
        columns={
            "attn.q_proj": ("queries",),
            "attn.k_proj": ("keys",),
            "attn.v_proj": ("keys",),
            "mlp.fc_in": ("units",),
        },
        rows=("attn.out_proj", "mlp.fc_out"),
        attention="attn",
        embedding="transformer.wte",
        layers="transformer.h",
        last_norm="transformer.ln_f",
        query_attributes=("num_attention_heads",),
        biases=frozenset({"mlp", "norms", "head"}),
        norms=1,
        shared_input="ln_1",
        attribute_map=_GPT2_ATTRIBUTES,
    ),
)
_BY_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}

ENCODER_DECODERS = ("t5",)
# Families that transformers' class for causal models takes, but whose attention also sees what follows, unless
# config.json says otherwise: a model trained like that sees its targets.
NOT_CAUSAL = frozenset(
    """
    bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
    roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod
    """.split()  # noqa: SIM905 - a list would have a line for each
)

# The linear layers of towers that read images, by the type of the whole model.
IMAGE_TOWERS: Mapping[str, tuple[str, ...]] = {"qwen3_vl": ("attn.qkv", "attn.proj", "linear_fc1", "linear_fc2")}

# Image-text models that transformers' class for causal models loads too; the harness of stage eval knows no other.
CAUSAL_IMAGE_TEXT = frozenset(
    """
    emu3 fuyu gemma3 gemma3n gemma4 gemma4_unified got_ocr2 llama4 mllama qwen3_5 qwen3_5_moe qwen4_exp
    """.split()  # noqa: SIM905 - as above
)


def family_of(model_type: str) -> Family | None:
    """The row of a config.json's model_type; None for a family that cannot be divided."""
    return _BY_TYPE.get(model_type)


def default_targets(model_type: str) -> tuple[str, ...]:
    """What gets LoRA adapters unless a run file says otherwise: all linears of a layer, of T5 as in PEFT.

    Families that have no row are taken to be built like Llama.
    """
    if model_type == "t5":
        return ("q", "v")
    family = family_of(model_type)
    columns, rows = (family.columns, family.rows) if family else (_LLAMA_COLUMNS, _LLAMA_ROWS)
    return tuple(dict.fromkeys(path.rpartition(".")[2] for path in (*columns, *rows)))


def divisible_types() -> str:
    """The model types of all rows, for the remedy of an error."""
    *others, last = sorted(_BY_TYPE)
    return f"{', '.join(others)} and {last}"
