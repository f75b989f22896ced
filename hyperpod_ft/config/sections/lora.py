"""LoRA adapters: section `lora`."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from hyperpod_ft.config.fields import PositiveFloat, PositiveInt, Section, Share


class Lora(Section):
    """LoRA adapters, as PEFT defines them."""

    r: PositiveInt = Field(16, description="Rank of the adapters.")
    alpha: PositiveFloat = Field(32, description="Scaling: the update is multiplied by alpha / r.")
    dropout: Share = Field(0.0, description="Dropout on the input of the adapters.")
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        None,
        description="Names of the linear modules and embeddings to adapt. If not set: all linear layers of attention"
        " and MLP of the model's family (docs/lora.md); for T5, `q` and `v`.",
    )
    rslora: bool = Field(False, description="Rank-stabilised LoRA: scale by alpha / sqrt(r).")
    dora: bool = Field(
        False, description="DoRA: also train the norm of each output's weights (the magnitude). Engine torch."
    )
    plus_ratio: PositiveFloat = Field(
        1.0,
        description="LoRA+: the learning rate of lora_B is this many times training.learning_rate; the paper suggests"
        " 16. Engine torch.",
    )
    quantization: Literal["none", "nf4"] = Field(
        "none",
        description="`nf4` keeps the weights that have adapters in 4 bits while training, except those of the output"
        " layer (QLoRA). Engine torch without tensor parallelism.",
    )

    @property
    def given_names(self) -> frozenset[str]:
        """The last components of the names in `target_modules`."""
        return last_parts(self.target_modules or ())


def last_parts(names: Iterable[str]) -> frozenset[str]:
    """The last component of each module name."""
    return frozenset(name.rpartition(".")[2] for name in names)
