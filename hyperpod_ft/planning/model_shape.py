"""A model's size from its config.json: widths, layers and heads, and from these its number of parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, PositiveInt, ValidationError

COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


@dataclass(frozen=True)
class ModelShape:
    """A causal language model of the Llama family. Widths are elements."""

    family: str  # config.json's model_type
    hidden: int
    intermediate: int
    layers: int
    heads: int  # of queries
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False  # input and output embeddings are one matrix
    head_norms: bool = False  # a norm over each query and key head
    qkv_bias: bool = False
    output_bias: bool = False  # of attention
    mlp_bias: bool = False

    @property
    def queries(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all key heads together; values have the same."""
        return self.kv_heads * self.head_dim

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """A layer's linear modules: name to (inputs, outputs)."""
        return {
            "q_proj": (self.hidden, self.queries),
            "k_proj": (self.hidden, self.keys),
            "v_proj": (self.hidden, self.keys),
            "o_proj": (self.queries, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def layer_vectors(self) -> int:
        """Parameters of a layer's norms and biases."""
        return (
            2 * self.hidden
            + (2 * self.head_dim if self.head_norms else 0)
            + (self.queries + 2 * self.keys if self.qkv_bias else 0)
            + (self.hidden if self.output_bias else 0)
            + (2 * self.intermediate + self.hidden if self.mlp_bias else 0)
        )

    @property
    def parameters(self) -> int:
        """All parameters; a tied matrix counts once."""
        layer = sum(inputs * outputs for inputs, outputs in self.linears.values()) + self.layer_vectors
        matrices = 1 if self.tied else 2
        return self.layers * layer + matrices * self.vocabulary * self.hidden + self.hidden


class _ConfigJson(BaseModel):
    """The keys of config.json that these families share. transformers lets most be null."""

    model_type: Literal["llama", "mistral", "qwen2", "qwen3", "granite"]
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    vocab_size: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    tie_word_embeddings: bool | None = None  # false in all of these families
    attention_bias: bool | None = None
    mlp_bias: bool | None = None


def model_shape(model_config: Mapping[str, Any]) -> ModelShape | None:
    """The shape that a parsed config.json describes; None for other families, whose keys or layers differ."""
    try:
        values = _ConfigJson.model_validate(model_config)
    except ValidationError:
        return None
    bias = bool(values.attention_bias)
    return ModelShape(
        family=values.model_type,
        hidden=values.hidden_size,
        intermediate=values.intermediate_size,
        layers=values.num_hidden_layers,
        heads=values.num_attention_heads,
        kv_heads=values.num_key_value_heads or values.num_attention_heads,
        head_dim=values.head_dim or values.hidden_size // values.num_attention_heads,
        vocabulary=values.vocab_size,
        tied=bool(values.tie_word_embeddings),
        head_norms=values.model_type == "qwen3",
        qkv_bias=bias or values.model_type == "qwen2",
        output_bias=bias,
        mlp_bias=bool(values.mlp_bias),
    )
