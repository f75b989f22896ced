"""A model's size from its config.json: widths, layers and heads, and from these its number of parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, PositiveInt, ValidationError

from hyperpod_ft.checkpoint.formats.model_directory import of_language_model
from hyperpod_ft.planning.families import Biased, Family, family_of


@dataclass(frozen=True)
class Linear:
    """A linear module of a layer. Widths are elements."""

    name: str  # the last part of its path
    inputs: int
    outputs: int
    by_outputs: bool  # tensor parallelism divides its outputs, not its inputs
    of_keys: bool  # its outputs are heads of keys or values alone


@dataclass(frozen=True)
class ModelShape:
    """A causal language model of a family of planning/families.py. Widths are elements."""

    model_type: str  # of config.json
    hidden: int
    intermediate: int
    layers: int
    heads: int  # of queries
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False  # input and output embeddings are one matrix
    biases: frozenset[Biased] = frozenset()
    positions: int = 0  # learned ones
    softcap: bool = False  # of attention's scores
    teacher: int = 0  # parameters of another model, which it learns from

    @property
    def family(self) -> Family:
        """How its modules are named and divided."""
        family = family_of(self.model_type)
        assert family is not None
        return family

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Width of all key heads together; values have the same."""
        return self.kv_heads * self.head_dim

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies an activated gate with another product."""
        return sum(len(parts) for path, parts in self.family.columns.items() if path.startswith("mlp.")) == 2

    @property
    def head_norms(self) -> bool:
        """Whether queries and keys are normalized."""
        return self.family.head_norms != "none"

    @property
    def linears(self) -> tuple[Linear, ...]:
        """A layer's linear modules."""
        widths = {
            "queries": self.query_width,
            "keys": self.key_width,
            "triples": 3 * self.query_width,
            "units": self.intermediate,
        }
        columns = (
            Linear(path.rpartition(".")[2], self.hidden, sum(widths[part] for part in parts), True, parts == ("keys",))
            for path, parts in self.family.columns.items()
        )
        rows = (
            Linear(path.rpartition(".")[2], inputs, self.hidden, False, False)
            for path, inputs in zip(self.family.rows, (self.query_width, self.intermediate), strict=True)
        )
        return (*columns, *rows)

    @property
    def modules(self) -> tuple[str, ...]:
        """The paths of all linear modules and embeddings."""
        family = self.family
        ends = (family.embedding, family.positions, family.head)
        layers = (
            f"{family.layers}.{layer}.{path}"
            for layer in range(self.layers)
            for path in (*family.columns, *family.rows)
        )
        return (*(path for path in ends if path), *layers)

    @property
    def column_biases(self) -> int:
        """Biases of a layer that tensor parallelism divides, as it does the outputs."""
        units = (2 if self.gated else 1) * self.intermediate
        return ("columns" in self.biases) * (self.query_width + 2 * self.key_width) + ("mlp" in self.biases) * units

    @property
    def layer_vectors(self) -> int:
        """Parameters of a layer's norms and its other biases."""
        norm = self.hidden * (2 if "norms" in self.biases else 1)
        of_heads = {"none": 0, "each": 2 * self.head_dim, "all": self.query_width + self.key_width}[
            self.family.head_norms
        ]
        return (
            self.family.norms * norm
            + of_heads
            + ("output" in self.biases) * self.hidden
            + ("mlp" in self.biases) * self.hidden
        )

    def vocabulary_on_rank(self, tensor_parallel: int) -> int:
        """Entries of the vocabulary on the fullest of the ranks that divide it."""
        return -(-self.vocabulary // tensor_parallel)

    def largest_parameter(self, tensor_parallel: int, expert_parallel: int) -> int:
        """Elements of the largest parameter on a rank: the embedding."""
        return self.vocabulary_on_rank(tensor_parallel) * self.hidden

    @property
    def layer_multiplied(self) -> int:
        """Elements of the matrices of a layer that a token is multiplied with."""
        return sum(linear.inputs * linear.outputs for linear in self.linears)

    @property
    def end_vectors(self) -> int:
        """Parameters of the last norm."""
        return self.hidden * (2 if "norms" in self.biases else 1)

    @property
    def parameters(self) -> int:
        """All parameters; a tied matrix counts once."""
        layer = self.layer_multiplied + self.column_biases + self.layer_vectors
        entry = (1 if self.tied else 2) * self.hidden + ("head" in self.biases)
        return self.layers * layer + self.vocabulary * entry + self.positions * self.hidden + self.end_vectors


class _ConfigJson(BaseModel):
    """The keys of config.json, as most families spell them. transformers lets most be null."""

    model_type: str
    hidden_size: PositiveInt
    intermediate_size: PositiveInt | None = None  # GPT-2 and GPT-J: four times the hidden size
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    vocab_size: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    max_position_embeddings: PositiveInt | None = None
    tie_word_embeddings: bool | None = None
    attn_logit_softcapping: float | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None


def attention_heads(model_config: Mapping[str, Any]) -> int | None:
    """The number of query heads in a config.json of any family; None where it has another name."""
    found = (model_config.get(key) for key in ("num_attention_heads", "n_head"))
    return next((heads for heads in found if isinstance(heads, int)), None)


# Language models of models that read images whose parameters are those of another type.
_BUILT_LIKE = {"qwen3_vl_text": "qwen3"}


def model_shape(model_config: Mapping[str, Any]) -> ModelShape | None:
    """The shape of the language model in a parsed config.json; None for other families, whose keys or layers differ."""
    model_config = of_language_model(model_config)
    given = str(model_config.get("model_type", ""))
    model_type = _BUILT_LIKE.get(given, given)
    family = family_of(model_type)
    if family is None:
        return None
    spelled = {usual: model_config.get(own) for usual, own in family.attribute_map.items()}
    try:
        values = _ConfigJson.model_validate({**model_config, **spelled})
    except ValidationError:
        return None
    if values.intermediate_size is None and "intermediate_size" not in family.attribute_map:
        return None
    return ModelShape(
        model_type=model_type,
        hidden=values.hidden_size,
        intermediate=values.intermediate_size or 4 * values.hidden_size,
        layers=values.num_hidden_layers,
        heads=values.num_attention_heads,
        kv_heads=values.num_key_value_heads or values.num_attention_heads,
        head_dim=values.head_dim or values.hidden_size // values.num_attention_heads,
        vocabulary=values.vocab_size,
        tied=family.tied if values.tie_word_embeddings is None else values.tie_word_embeddings,
        biases=_biases(family, values),
        softcap=values.attn_logit_softcapping is not None,
        positions=(values.max_position_embeddings or 0) if family.positions else 0,
    )


def _biases(family: Family, values: _ConfigJson) -> frozenset[Biased]:
    named_by: dict[Literal["attention_bias", "mlp_bias"], set[Biased]] = {
        "attention_bias": {"columns", "output"},
        "mlp_bias": {"mlp"},
    }
    biases = set(family.biases)
    for key, named in named_by.items():
        value = getattr(values, key)
        # Qwen2 has its biases even if config.json says otherwise
        if value is not None and not (family.biases == {"columns"} and not value):
            biases = biases | named if value else biases - named
    return frozenset(biases)
