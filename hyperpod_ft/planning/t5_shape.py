"""The size of a T5 or Flan-T5 from its config.json."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, PositiveInt, ValidationError

from hyperpod_ft.planning.families import Family
from hyperpod_ft.planning.model_shape import ModelShape


@dataclass(frozen=True)
class T5Shape(ModelShape):
    """`layers` are the encoder's and the decoder's. A decoder's layer has a second attention, to the encoder."""

    decoder_layers: int = 0
    gated: bool = True
    buckets: int = 32  # of the distances that share a bias

    @property
    def family(self) -> Family:
        """The family, which is not in the table of families: their models are one stack of layers."""
        return Family((self.model_type,), columns={}, rows=())

    @property
    def encoder_layers(self) -> int:
        return self.layers - self.decoder_layers

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The matrices of a layer of the encoder; a decoder's second attention has the first four again."""
        attention = dict.fromkeys(("q", "k", "v"), (self.hidden, self.query_width)) | {
            "o": (self.query_width, self.hidden)
        }
        inputs = ("wi_0", "wi_1") if self.gated else ("wi",)
        return attention | dict.fromkeys(inputs, (self.hidden, self.intermediate)) | {"wo": self._outputs}

    @property
    def _outputs(self) -> tuple[int, int]:
        return self.intermediate, self.hidden

    def times(self, linear: str) -> tuple[int, int]:
        """How often each linear layer occurs in the encoder's layers, and in the decoder's."""
        return self.encoder_layers, self.decoder_layers * (2 if linear in ("q", "k", "v", "o") else 1)

    @property
    def modules(self) -> tuple[str, ...]:
        """The paths of the linear modules that can have adapters."""
        attention = [name for name in self.matrices if name in ("q", "k", "v", "o")]
        units = [f"DenseReluDense.{name}" for name in self.matrices if name not in attention]
        own, cross = ([f"{kind}Attention.{name}" for name in attention] for kind in ("Self", "EncDec"))
        stacks = (
            ("encoder", self.encoder_layers, (own, units)),
            ("decoder", self.decoder_layers, (own, cross, units)),
        )
        return tuple(
            f"{stack}.block.{block}.layer.{number}.{path}"
            for stack, blocks, layers in stacks
            for block in range(blocks)
            for number, paths in enumerate(layers)
            for path in paths
        )

    @property
    def layers_parameters(self) -> int:
        """The parameters of all layers together, with the bias of each stack, which the first layer has."""
        linears = sum(sum(self.times(name)) * inputs * outputs for name, (inputs, outputs) in self.matrices.items())
        norms = (2 * self.encoder_layers + 3 * self.decoder_layers) * self.hidden
        return linears + norms + 2 * self.buckets * self.heads

    def end_parameters(self, tensor_parallel: int = 1) -> int:
        """Embedding, output matrix and the last norm of each stack, on the fullest of tensor-parallel ranks."""
        return (1 if self.tied else 2) * self.vocabulary_on_rank(tensor_parallel) * self.hidden + 2 * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers_parameters + self.end_parameters()

    def adapters(self, targets: Collection[str], rank: int) -> tuple[int, int]:
        """LoRA parameters of the encoder and of the decoder."""
        pairs = [
            [count * rank * (inputs + outputs) for count in self.times(name)]
            for name, (inputs, outputs) in self.matrices.items()
            if name in targets
        ]
        return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)


class _ConfigJson(BaseModel):
    model_type: Literal["t5"]
    d_model: PositiveInt
    d_kv: PositiveInt
    d_ff: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    vocab_size: PositiveInt
    num_decoder_layers: PositiveInt | None = None
    relative_attention_num_buckets: PositiveInt = 32
    feed_forward_proj: str = "relu"
    tie_word_embeddings: bool = True
    scale_decoder_outputs: bool | None = None


def t5_shape(model_config: Mapping[str, Any]) -> T5Shape | None:
    """The shape that a parsed config.json describes; None for other families."""
    try:
        values = _ConfigJson.model_validate(model_config)
    except ValidationError:
        return None
    decoder_layers = values.num_decoder_layers or values.num_layers
    return T5Shape(
        model_type=values.model_type,
        hidden=values.d_model,
        intermediate=values.d_ff,
        layers=values.num_layers + decoder_layers,
        heads=values.num_heads,
        kv_heads=values.num_heads,
        head_dim=values.d_kv,
        vocabulary=values.vocab_size,
        # as in checkpoint/formats/model_directory.py, if the files have an output matrix
        tied=values.tie_word_embeddings if values.scale_decoder_outputs is None else values.scale_decoder_outputs,
        decoder_layers=decoder_layers,
        gated=values.feed_forward_proj.startswith("gated"),
        buckets=values.relative_attention_num_buckets,
    )
