"""Sharding: what each data-parallel rank keeps whole, and what it shares with others.

Four modes (the stages of ZeRO: Rajbhandari et al., arXiv:1910.02054; sharding within groups of ranks: Zhao et al.,
arXiv:2304.11277, section 3.2.2). What is sharded is divided over `shard_ranks` data-parallel ranks; groups of that many
ranks hold the same and sum their gradients.

| mode | weights | gradients | optimizer state |
|---|---|---|---|
| replicated | whole | whole | whole |
| zero1 | whole | whole | sharded |
| zero2 | whole from the first forward pass of a step to its last backward pass | sharded | sharded |
| zero3 | gathered layer by layer | sharded | sharded |
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.degrees import Degrees, listed_divisors

Mode = Literal["replicated", "zero1", "zero2", "zero3"]
Offload = Literal["none", "optimizer", "parameters"]
# Gradients are reduced, and parameters updated, in groups of up to this size on a rank; consecutive layers share their
# all-gathers and reduce-scatters up to it.
BUCKET_BYTES = 32 * 2**20
_MODES: tuple[Mode, ...] = ("replicated", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Sharding:
    """How the data-parallel ranks of engine torch divide the state of training."""

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


def candidates(config: RunConfig, degrees: Degrees) -> Iterator[Sharding]:
    """The shardings that the run file allows, the fastest first.

    Raises UserError when `shard_ranks` does not divide the data-parallel ranks.

    LoRA is fastest without any: its gradients are small. With all parameters trained, zero1 communicates as much as
    replicated ranks do and updates less on each. The others communicate more: gradients after every micro batch
    (zero2), weights in every forward and backward pass (zero3, within a node before across nodes).
    """
    given, ranks = config.parallelism, degrees.weight_replicas
    _check_shard_ranks(given.shard_ranks, ranks)
    in_node = max(1, degrees.ranks_per_node // degrees.tensor_parallel)
    for mode in _order(config):
        if mode == "replicated":
            yield Sharding(mode, 1, given.offload)
        elif given.shard_ranks:
            yield _over(given.shard_ranks, mode, given.offload)
        else:
            if mode == "zero3" and in_node < ranks:
                yield _over(in_node, mode, given.offload)
            yield _over(ranks, mode, given.offload)


def _over(shard_ranks: int, mode: Mode, offload: Offload) -> Sharding:
    """The sharding over this many ranks. A single rank shards nothing, but may keep parameters in host memory."""
    if shard_ranks == 1 and offload != "parameters":
        return Sharding("replicated", 1, offload)
    return Sharding(mode, shard_ranks, offload)


def _order(config: RunConfig) -> tuple[Mode, ...]:
    given = config.parallelism
    if given.sharding != "auto":
        return (given.sharding,)
    if given.offload == "parameters":
        return ("zero3",)
    return _MODES if config.training.method == "lora" else _MODES[1:]


def _check_shard_ranks(given: int | None, replicas: int) -> None:
    if given and replicas % given:
        raise UserError(
            f"parallelism.shard_ranks: {given} does not divide the {replicas} data-parallel ranks",
            f"set it to {listed_divisors(replicas)}, or leave it out",
        )
