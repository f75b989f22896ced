"""A pipeline of engine torch: its schedule, the layers of each stage, and the share of a step in which ranks are idle.

Each of the `gradient_accumulation_steps` micro batches of a step passes through all stages, forward and backward. With
`interleaved` a rank has several stages, p apart for p ranks (Narayanan et al., arXiv:2104.04473, section 2.2).
"""

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.layout import Degrees
from hyperpod_ft.planning.model_shape import ModelShape


def token_operations(config: RunConfig, shape: ModelShape) -> tuple[float, float]:
    """Of a layer, and of the output matrix; an embedding is looked up, which is not counted.

    2 for each element of a matrix forward, 2 for the gradient of its input, and 2 for its own if it is trained, with
    what is computed again. Of experts, those count that a token passes through.
    Attention over T positions and a width q of all query heads has 4 q T forward and twice that backward.
    """
    training = config.training
    trained, again = training.method == "full", training.activation_checkpointing == "full"
    attention = 4 * shape.query_width * config.dataset.max_length
    matrices = shape.layer_multiplied
    forward = 2 * matrices + attention
    backward = 2 * matrices * (1 + trained) + 2 * attention
    layer = forward * (1 + again / training.activation_checkpointing_every) + backward
    return layer, 2 * shape.vocabulary * shape.hidden * (2 + trained)


def stages_per_rank(config: RunConfig) -> int:
    """How many stages a rank has."""
    return config.parallelism.virtual_pipeline_parallel if config.parallelism.pipeline_schedule == "interleaved" else 1


def stages_of(rank: int, config: RunConfig, degrees: Degrees) -> range:
    """The numbers of the stages that a rank of the pipeline has."""
    ranks = degrees.pipeline_parallel
    return range(rank, ranks * stages_per_rank(config), ranks)


def idle_share(config: RunConfig, degrees: Degrees) -> float:
    """The pipeline's bubble: the share of a step in which a rank waits for the others, if all stages take as long.

    (p - 1) / (v m + p - 1) for m micro batches on p ranks with v stages each (sections 2.1 and 2.2 of the paper above).
    """
    others = degrees.pipeline_parallel - 1
    return others / (stages_per_rank(config) * config.training.gradient_accumulation_steps + others)


def in_flight(config: RunConfig, degrees: Degrees) -> list[float]:
    """How many micro batches have activations in memory at the same time, on each rank of the pipeline.

    1F1B begins with p - k forward passes on rank k of p, GPipe with all. `interleaved` begins with (v - 1) r + 2 (p - 1
    - k) + 1 passes through one of the rank's v stages, in rounds of r micro batches: each is 1/v of a micro batch.
    """
    ranks, count = degrees.pipeline_parallel, config.training.gradient_accumulation_steps
    schedule, stages = config.parallelism.pipeline_schedule, stages_per_rank(config)
    if schedule == "gpipe":
        return [count] * ranks
    if schedule == "1f1b" or ranks == 1:
        return [min(ranks - rank, count) for rank in range(ranks)]
    a_round = count // (count // ranks)
    passes = [(stages - 1) * a_round + 2 * (ranks - 1 - rank) + 1 for rank in range(ranks)]
    return [min(each / stages, count) for each in passes]


def cut(config: RunConfig, degrees: Degrees, shape: ModelShape) -> list[range]:
    """The layers of each stage, so that the slowest has as few operations as possible; each has at least one.

    The last stage has the output matrix too. Of equal stages the later ones get the layers left over, since earlier
    ones keep more micro batches in memory.
    """
    stages = degrees.pipeline_parallel * stages_per_rank(config)
    layer, head = token_operations(config, shape)
    counts = [1] * stages
    for _ in range(shape.layers - stages):
        costs = [layer * (count + 1) + head * (stage == stages - 1) for stage, count in enumerate(counts)]
        counts[min(range(stages), key=lambda stage: (costs[stage], -stage))] += 1
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def layers_of_ranks(config: RunConfig, degrees: Degrees, shape: ModelShape) -> list[int]:
    """How many layers each rank of the pipeline has, in all its stages."""
    stages = cut(config, degrees, shape)
    return [
        sum(len(stages[stage]) for stage in stages_of(rank, config, degrees))
        for rank in range(degrees.pipeline_parallel)
    ]


def explain(config: RunConfig, degrees: Degrees, shape: ModelShape) -> str:
    """Schedule, layers of each rank, and what is lost, in one line."""
    stages = cut(config, degrees, shape)
    layer, head = token_operations(config, shape)
    costs = [layer * count for count in layers_of_ranks(config, degrees, shape)]
    costs[-1] += head
    uneven = max(costs) * len(costs) / sum(costs)
    layers = " | ".join(
        " + ".join(_shown(stages[stage]) for stage in stages_of(rank, config, degrees))
        for rank in range(degrees.pipeline_parallel)
    )
    return (
        f"{config.parallelism.pipeline_schedule}, {config.training.gradient_accumulation_steps} micro batches: idle"
        f" {idle_share(config, degrees):.1%}; layers {layers} and head, the slowest {uneven:.2f} x the mean"
    )


def _shown(layers: range) -> str:
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else f"{layers[0]}"
