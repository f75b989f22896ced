"""How long an optimizer step of engine torch takes: an estimate that compares degrees before anything runs.

Computation is counted in planning/torch/pipeline.py. Bytes are those that a rank sends: (n - 1)/n of a buffer
in an all-gather, reduce-scatter or all-to-all over n ranks, and twice that in an all-reduce (Thakur et al., doi
10.1177/1094342005051521, section 4). How long ranks of a pipeline wait is in planning/torch/pipeline.py.

The efficiencies are assumptions, not measurements of this kit. They are the same for all degrees of a run, and matter
for the order only where computation and communication are about as long.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.layout import Degrees, Sharding
from hyperpod_ft.planning.memory import FP32, element_bytes
from hyperpod_ft.planning.model_shape import ModelShape
from hyperpod_ft.planning.stage_sizes import PipelineStageSize
from hyperpod_ft.planning.torch import pipeline
from hyperpod_ft.planning.torch.memory import key_value_copies
from hyperpod_ft.planning.torch.pipeline import token_operations

COMPUTE_EFFICIENCY = 0.4  # of the accelerators' peak
LINK_EFFICIENCY = 0.7  # of the links' published bandwidth
OVERLAP = 0.8  # of the shorter of computation and what data-parallel ranks exchange
# Of a CPU rank. Computation is the same under all degrees; communication decides.
_CPU_FLOPS, _CPU_BANDWIDTH = 1e11, 1e9


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on a rank, by what they are spent on."""

    compute: float
    tensor: float  # sums over tensor-parallel ranks
    context: float  # exchanges of ranks that share rows
    pipeline: float  # waiting for other stages, and their activations
    data: float  # gradients and weights of data-parallel ranks

    @property
    def total(self) -> float:
        hidden = OVERLAP * min(self.compute, self.data)
        return self.compute + self.tensor + self.context + self.pipeline + self.data - hidden


def step_time(
    config: RunConfig, degrees: Degrees, shape: ModelShape, sharding: Sharding, sizes: Sequence[PipelineStageSize]
) -> StepTime:
    """The estimate for degrees that the model allows. `sizes`: of the stages of a pipeline."""
    links = _Links(config, degrees)
    tensor, context, stages = degrees.tensor_parallel, degrees.context_parallel, degrees.pipeline_parallel
    micro_batches = config.training.gradient_accumulation_steps
    tokens = micro_batches * config.training.micro_batch_size * config.dataset.max_length / context  # of a rank
    layers = -(-shape.layers // stages)
    activation = tokens * shape.hidden * element_bytes(config)
    checkpointing = config.training.activation_checkpointing

    layer, head = token_operations(config, shape)
    flops_per_token = shape.layers * layer + head
    compute = tokens * flops_per_token / (tensor * stages) / links.flops
    # each block sums its output in the forward pass, and its input's gradient in the backward pass
    sums = layers * (4 + {"none": 0, "selective": 1, "full": 2}[checkpointing])
    in_tensor = 2 * sums * links.exchange(activation, tensor, stride=1)
    heads = 2 * shape.query_width + 2 * shape.key_width * key_value_copies(degrees, shape)
    passes = layers * (2 + (checkpointing == "full"))
    exchanged = tokens * heads * element_bytes(config) / tensor
    in_context = passes * links.exchange(exchanged, context, stride=tensor, to_each=True)
    idle = pipeline.idle_share(config, degrees)
    waiting = (compute + in_tensor + in_context) * idle / (1 - idle)
    passes_on = 2 * pipeline.stages_per_rank(config)
    sent = passes_on * links.send(activation, stride=tensor * degrees.weight_replicas) if stages > 1 else 0.0
    largest = max(sizes, key=lambda stage: stage.parameters)
    return StepTime(compute, in_tensor, in_context, waiting + sent, _data(config, degrees, largest, sharding, links))


def _data(config: RunConfig, degrees: Degrees, stage: PipelineStageSize, sharding: Sharding, links: "_Links") -> float:
    """Seconds of what docs/parallelism.md says that each sharding exchanges."""
    ranks, replicas = sharding.shard_ranks, degrees.weight_replicas
    inner, outer = degrees.tensor_parallel, degrees.tensor_parallel * ranks
    micro_batches = config.training.gradient_accumulation_steps
    gradients = float(stage.trainable * FP32)
    between_groups = 2 * links.exchange(gradients / ranks, replicas // ranks, stride=outer)
    scatter = links.exchange(gradients, ranks, stride=inner)
    if not sharding.by_layer:
        updated = float(stage.trainable * element_bytes(config))
        return between_groups + scatter + links.exchange(updated, ranks, stride=inner)
    gather = links.exchange(float(stage.parameters * element_bytes(config)), ranks, stride=inner)
    gathers = 2 * micro_batches if sharding.mode == "zero3" else 1
    return between_groups + micro_batches * scatter + gathers * gather


class _Links:
    """The speed of a rank, and of its links within and between nodes."""

    def __init__(self, config: RunConfig, degrees: Degrees) -> None:
        instance = config.instance
        on_accelerators = instance.has_accelerators
        self.flops = instance.rank_tflops * 1e12 * COMPUTE_EFFICIENCY if on_accelerators else _CPU_FLOPS
        self._link = instance.rank_link_gbs * 1e9 * LINK_EFFICIENCY if on_accelerators else _CPU_BANDWIDTH
        if instance.ranks == 1:
            self._link = math.inf  # a node's only rank has no link within it, and never waits for one
        # the ranks of a node share its network
        self._network = instance.rank_network_gbs * 1e9 * LINK_EFFICIENCY if on_accelerators else _CPU_BANDWIDTH
        self._ranks_per_node = degrees.ranks_per_node

    def exchange(self, size: float, ranks: int, stride: int, to_each: bool = False) -> float:
        """Seconds in which `ranks` ranks, every `stride`-th one, gather or scatter `size` bytes once.

        Across nodes, each rank of the group on a node sends its part over its own share of the network. `to_each`: each
        rank sends different data to every other.
        """
        if ranks == 1:
            return 0.0
        if ranks * stride <= self._ranks_per_node:
            bandwidth = self._link
        else:
            on_node = 1 if to_each else max(1, self._ranks_per_node // stride)
            bandwidth = min(self._link, self._network * on_node)
        return size * (ranks - 1) / ranks / bandwidth

    def send(self, size: float, stride: int) -> float:
        """Seconds in which a rank sends `size` bytes to the one `stride` ranks further."""
        return size / (self._link if stride < self._ranks_per_node else self._network)
