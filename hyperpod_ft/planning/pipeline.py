"""Pipeline parallelism of engine torch: the layers of each stage, and the share of a step that ranks are idle.

Each of the `gradient_accumulation_steps` micro batches of a step passes through all stages, forward and backward. With
`interleaved` a rank has several stages, p apart for p ranks (Narayanan et al., arXiv:2104.04473, section 2.2).
"""

from hyperpod_ft.config.fields import shown
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.degrees import Degrees
from hyperpod_ft.planning.model_shape import ModelShape

# Families whose stages were shown to compute what the whole model does (tests/training/test_pipeline.py).
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "granite"})


def stages_per_rank(config: RunConfig) -> int:
    """How many stages a rank has."""
    return config.parallelism.virtual_pipeline_parallel if config.parallelism.pipeline_schedule == "interleaved" else 1


def idle_share(config: RunConfig, degrees: Degrees) -> float:
    """The pipeline's bubble: the share of a step in which a rank waits for the others, if all stages take as long.

    (p - 1) / (v m + p - 1) for m micro batches on p ranks with v stages each (sections 2.1 and 2.2 of the paper above).
    """
    others = degrees.pipeline_parallel - 1
    return others / (stages_per_rank(config) * config.training.gradient_accumulation_steps + others)


def check_micro_batches(config: RunConfig, degrees: Degrees) -> None:
    """Refuse numbers of micro batches that leave ranks idle for long, or that the schedule cannot divide."""
    ranks, count = degrees.pipeline_parallel, config.training.gradient_accumulation_steps
    if ranks == 1:
        return
    if count < ranks:
        raise UserError(
            f"training.gradient_accumulation_steps: {count} micro batches for {ranks} pipeline stages, which would be"
            f" idle {idle_share(config, degrees):.0%} of the time",
            f"set it to at least {ranks}; with {4 * ranks} it would be"
            f" {(ranks - 1) / (stages_per_rank(config) * 4 * ranks + ranks - 1):.0%}",
        )
    if config.parallelism.pipeline_schedule == "interleaved" and count % (count // ranks):
        # they go through a rank's stages in rounds of one size (torch's ScheduleInterleaved1F1B)
        raise UserError(
            f"training.gradient_accumulation_steps: schedule interleaved cannot divide {count} micro batches into"
            f" {count // ranks} equal rounds for {ranks} pipeline ranks",
            f"set it to a multiple of {ranks}",
        )


def check_family(degrees: Degrees, family: str) -> None:
    """Refuse a family whose models cannot be cut into stages. `family` is config.json's model_type."""
    if degrees.pipeline_parallel > 1 and family not in FAMILIES:
        raise UserError(
            f"parallelism.pipeline_parallel: engine torch cannot cut models of type {shown(family)} into stages",
            f"set it to 1, or choose a model of type {', '.join(sorted(FAMILIES))}",
        )


def check_layers(config: RunConfig, degrees: Degrees, shape: ModelShape) -> None:
    """Refuse more stages than layers, and stages that would train nothing."""
    if degrees.pipeline_parallel == 1:
        return
    stages = degrees.pipeline_parallel * stages_per_rank(config)
    if shape.layers < stages:
        raise UserError(
            f"parallelism.virtual_pipeline_parallel: {degrees.pipeline_parallel} ranks x {stages_per_rank(config)}"
            f" stages = {stages} for {shape.layers} layers",
            f"lower it or pipeline_parallel, so that there are at most {shape.layers}",
        )
    if config.training.method == "lora" and not shape.linears.keys() & config.lora.target_names:
        raise UserError(
            "lora.target_modules: has no module of the layers, so that pipeline stages would train nothing",
            "name some, or set parallelism.pipeline_parallel to 1",
        )


def cut(config: RunConfig, degrees: Degrees, shape: ModelShape) -> list[range]:
    """The layers of each stage, so that the slowest has as few operations as possible; each has at least one.

    The last stage has the output matrix too. An embedding is looked up, which is not counted. Of equal stages the later
    ones get the layers left over, since earlier ones keep more micro batches in memory.
    """
    stages = degrees.pipeline_parallel * stages_per_rank(config)
    layer, head = _operations(config, shape)
    counts = [1] * stages
    for _ in range(shape.layers - stages):
        costs = [layer * (count + 1) + head * (stage == stages - 1) for stage, count in enumerate(counts)]
        counts[min(range(stages), key=lambda stage: (costs[stage], -stage))] += 1
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def stages_of(rank: int, config: RunConfig, degrees: Degrees) -> range:
    """The numbers of the stages that a rank of the pipeline has."""
    ranks = degrees.pipeline_parallel
    return range(rank, ranks * stages_per_rank(config), ranks)


def layers_of_ranks(config: RunConfig, degrees: Degrees, shape: ModelShape) -> list[int]:
    """How many layers each rank of the pipeline has, in all its stages."""
    stages = cut(config, degrees, shape)
    return [
        sum(len(stages[stage]) for stage in stages_of(rank, config, degrees))
        for rank in range(degrees.pipeline_parallel)
    ]


def in_flight(config: RunConfig, degrees: Degrees) -> list[int]:
    """How many micro batches have activations in memory at the same time, on each rank of the pipeline.

    1F1B begins with p - k forward passes on rank k of p, GPipe with all. `interleaved` begins with (v - 1) r + 2 (p - 1
    - k) + 1 passes through one of the rank's v stages, in rounds of r micro batches.
    """
    ranks, count = degrees.pipeline_parallel, config.training.gradient_accumulation_steps
    schedule, stages = config.parallelism.pipeline_schedule, stages_per_rank(config)
    if schedule == "gpipe":
        return [count] * ranks
    if schedule == "1f1b" or ranks == 1:
        return [min(ranks - rank, count) for rank in range(ranks)]
    a_round = count // (count // ranks)
    passes = [(stages - 1) * a_round + 2 * (ranks - 1 - rank) + 1 for rank in range(ranks)]
    return [min(-(-each // stages), count) for each in passes]


def explain(config: RunConfig, degrees: Degrees, shape: ModelShape) -> str:
    """Schedule, layers of each rank, and what is lost, in one line."""
    stages = cut(config, degrees, shape)
    layer, head = _operations(config, shape)
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


def _operations(config: RunConfig, shape: ModelShape) -> tuple[float, float]:
    """Operations on a token in one layer, and in the output matrix: forward, backward, and what is computed again.

    2 for each element of a matrix forward, 2 for the gradient of its input, and 2 for its own if it is trained;
    attention over T positions and a width q of all query heads has 4 q T forward and twice that backward.
    """
    trained = config.training.method == "full"
    training = config.training
    again = training.activation_checkpointing == "full"
    matrices = sum(inputs * outputs for inputs, outputs in shape.linears.values())
    attention = 4 * shape.queries * config.dataset.max_length
    forward = 2 * matrices + attention
    layer = forward * (1 + again / training.activation_checkpointing_every) + 2 * matrices * (1 + trained)
    return layer + 2 * attention, 2 * shape.vocabulary * shape.hidden * (2 + trained)
