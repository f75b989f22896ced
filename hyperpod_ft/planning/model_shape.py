"""What config.json tells of a model's size: its widths, layers and heads, and from these its parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# built like Llama: their configurations spell the same sizes alike
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "granite")
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
    tied: bool = False  # one matrix embeds tokens and predicts them
    head_norms: bool = False  # norms over each query's and key's head
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


def model_shape(model_config: Mapping[str, Any]) -> ModelShape | None:
    """The shape that a parsed config.json describes; None for other families, which spell or build it otherwise."""
    family = model_config.get("model_type")
    if family not in _FAMILIES:
        return None
    try:
        heads = int(model_config["num_attention_heads"])
        hidden = int(model_config["hidden_size"])
        bias = bool(model_config.get("attention_bias"))
        return ModelShape(
            family=str(family),
            hidden=hidden,
            intermediate=int(model_config["intermediate_size"]),
            layers=int(model_config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(model_config.get("num_key_value_heads") or heads),
            head_dim=int(model_config.get("head_dim") or hidden // heads),
            vocabulary=int(model_config["vocab_size"]),
            tied=bool(model_config.get("tie_word_embeddings", False)),  # what these families take it for
            head_norms=family == "qwen3",
            qkv_bias=bias or family == "qwen2",
            output_bias=bias,
            mlp_bias=bool(model_config.get("mlp_bias")),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
