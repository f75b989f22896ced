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

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter

from hyperpod_ft.errors import UserError


@dataclass(frozen=True)
class Degrees:
    """How `nodes * ranks_per_node` processes divide into groups of each kind of parallelism."""

    nodes: int
    ranks_per_node: int
    tensor_parallel: int
    pipeline_parallel: int
    context_parallel: int = 1
    expert_parallel: int = 1  # of `weight_replicas`, neighbors that divide the experts of a mixture

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def model_ranks(self) -> int:
        """Ranks that train on the same rows together."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def data_parallel(self) -> int:
        return self.world_size // self.model_ranks

    @property
    def weight_replicas(self) -> int:
        """Ranks that compute with the same weights, and so sum their gradients and can shard their state."""
        return self.data_parallel * self.context_parallel

    def expert_shard_ranks(self, shard_ranks: int) -> int:
        """Ranks that divide the state of the same experts, where `shard_ranks` divide that of other weights."""
        return max(1, shard_ranks // self.expert_parallel)

    def can_shard_experts(self, shard_ranks: int) -> bool:
        """Whether that is possible: one of the two numbers divides the other."""
        smaller, larger = sorted((shard_ranks, self.expert_parallel))
        return larger % smaller == 0

    def __str__(self) -> str:
        """For example `dp 4 x tp 8`, `dp 2 x pp 4 x tp 8` with a pipeline, `dp 8 x tp 1, ep 4` with divided experts."""
        experts = f", ep {self.expert_parallel}" if self.expert_parallel > 1 else ""
        context = f" x cp {self.context_parallel}" if self.context_parallel > 1 else ""
        pipeline = f" x pp {self.pipeline_parallel}" if self.pipeline_parallel > 1 else ""
        return f"dp {self.data_parallel}{context}{pipeline} x tp {self.tensor_parallel}{experts}"


def divisors(number: int) -> list[int]:
    """Every divisor, in ascending order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def listed_divisors(number: int) -> str:
    """Every divisor, for the remedy of an error.

    >>> listed_divisors(12)
    '1, 2, 3, 4, 6 or 12'
    """
    *others, last = map(str, divisors(number))
    return f"{', '.join(others)} or {last}" if others else last


def check_divides(degrees: Degrees, what: str, size: int) -> None:
    """Raise UserError when the tensor-parallel degree does not divide the size of a part of the model."""
    if size % degrees.tensor_parallel:
        raise UserError(
            f"parallelism.tensor_parallel: {degrees.tensor_parallel} does not divide the model's {what} {size}",
            f"set it to {listed_divisors(math.gcd(size, degrees.ranks_per_node))}",
        )


def copies_over_tensor(kv_heads: int, ranks: int) -> int:
    """How many ranks of a tensor-parallel group hold each key/value head.

    Engine neuron's is the same: optimum-neuron's `TrainingNeuronConfig.auto_kv_size_multiplier`.
    """
    return max(1, ranks // kv_heads)


def copies_over_context(kv_heads: int, ranks: int) -> int:
    """How many of the ranks that share a row hold each key/value head in attention.

    `kv_heads`: of a tensor-parallel rank.
    """
    return ranks // math.gcd(ranks, kv_heads)


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
