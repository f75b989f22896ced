"""The degrees of parallelism of a run."""

import math
from dataclasses import dataclass

from hyperpod_ft.errors import UserError


@dataclass(frozen=True)
class Degrees:
    """How `nodes * ranks_per_node` processes divide into groups of each kind of parallelism."""

    nodes: int
    ranks_per_node: int
    tensor_parallel: int
    pipeline_parallel: int
    context_parallel: int = 1

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

    def __str__(self) -> str:
        """For example `dp 4 x tp 8`, and `dp 2 x pp 4 x tp 8` with a pipeline."""
        context = f" x cp {self.context_parallel}" if self.context_parallel > 1 else ""
        pipeline = f" x pp {self.pipeline_parallel}" if self.pipeline_parallel > 1 else ""
        return f"dp {self.data_parallel}{context}{pipeline} x tp {self.tensor_parallel}"


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
