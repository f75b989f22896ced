"""Layout: how the ranks of a training divide its model, its state and its rows.

The state has four modes (the stages of ZeRO: Rajbhandari et al., arXiv:1910.02054; sharding within groups of ranks:
Zhao et al., arXiv:2304.11277, section 3.2.2). What is sharded is divided over `shard_ranks` data-parallel ranks; groups
of that many ranks hold the same and sum their gradients.

| mode | weights | gradients | optimizer state |
|---|---|---|---|
| replicated | whole | whole | whole |
| zero1 | whole | whole | sharded |
| zero2 | whole from the first forward pass of a step to its last backward pass | sharded | sharded |
| zero3 | gathered layer by layer | sharded | sharded |
"""

from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter

from hyperpod_ft.planning.degrees import Degrees

Mode = Literal["replicated", "zero1", "zero2", "zero3"]
Offload = Literal["none", "optimizer", "parameters"]
# Gradients are reduced, and parameters updated, in groups of up to this size on a rank; consecutive layers share their
# all-gathers and reduce-scatters up to it.
BUCKET_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Sharding:
    """How the data-parallel ranks divide the state of training."""

    mode: Mode
    shard_ranks: int  # data-parallel ranks that hold one copy of what is sharded; a divisor of all
    offload: Offload = "none"  # what is kept in host memory

    @property
    def by_layer(self) -> bool:
        """Whether FSDP2 shards the weights, layer by layer."""
        return self.mode in ("zero2", "zero3")

    def __str__(self) -> str:
        shared = f" over {self.shard_ranks} ranks" if self.shard_ranks > 1 else ""
        host = f", {self.offload} in host memory" if self.offload != "none" else ""
        return f"{self.mode}{shared}{host}"


@dataclass(frozen=True)
class Layout:
    """What a rank needs to know about the division, from the run file and the model's config.json."""

    degrees: Degrees
    sharding: Sharding
    stages: tuple[tuple[int, int], ...] = ()
    """The pipeline's stages, in order: the number of the first layer, and of the one after the last. Empty without a
    pipeline, or where another library cuts it."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks divide what lies between attention and MLP by position."""
    own_attention: bool = False
    """Whether the engine computes the attention itself, and so separates the documents of a row."""

    @classmethod
    def of_json(cls, text: bytes) -> "Layout":
        """The layout that `as_json` wrote."""
        return _LAYOUT.validate_json(text)

    def as_json(self) -> str:
        return _LAYOUT.dump_json(self, indent=2).decode()


_LAYOUT = TypeAdapter(Layout)
