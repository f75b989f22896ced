"""Which layers each stage of a pipeline has: so that all compute about as long."""

from hyperpod_ft.config.fields import shown
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.degrees import Degrees
from hyperpod_ft.planning.families import divisible_types, family_of
from hyperpod_ft.planning.lora_targets import adapted_linears
from hyperpod_ft.planning.model_shape import ModelShape
from hyperpod_ft.planning.torch.pipeline_schedule import idle_share, stages_of, stages_per_rank
from hyperpod_ft.planning.torch.token_operations import token_operations


def check_family(degrees: Degrees, family: str) -> None:
    """Refuse a family whose models cannot be cut into stages. `family` is config.json's model_type."""
    if degrees.pipeline_parallel > 1 and family_of(family) is None:
        raise UserError(
            f"parallelism.pipeline_parallel: engine torch cannot cut models of type {shown(family)} into stages",
            f"set it to 1; it cuts {divisible_types()}",
        )


def check_layers(config: RunConfig, degrees: Degrees, layers: int) -> None:
    """Refuse more stages than layers."""
    stages = degrees.pipeline_parallel * stages_per_rank(config)
    if degrees.pipeline_parallel > 1 and layers < stages:
        raise UserError(
            f"parallelism.virtual_pipeline_parallel: {degrees.pipeline_parallel} ranks x {stages_per_rank(config)}"
            f" stages = {stages} for {layers} layers",
            f"lower it or pipeline_parallel, so that there are at most {layers}",
        )


def check_targets(config: RunConfig, degrees: Degrees, shape: ModelShape) -> None:
    """Refuse adapters that would leave stages with nothing to train."""
    if degrees.pipeline_parallel == 1 or config.training.method != "lora":
        return
    if not adapted_linears(config.lora, shape):
        raise UserError(
            "lora.target_modules: names no module of the layers, so pipeline stages would train nothing",
            "name some, or set parallelism.pipeline_parallel to 1",
        )


def cut(config: RunConfig, degrees: Degrees, shape: ModelShape) -> list[range]:
    """The layers of each stage, so that the slowest has as few operations as possible; each has at least one.

    The last stage has the output matrix too. Of equal stages the later ones get the layers left over, since earlier
    ones keep more micro batches in memory.
    """
    stages = degrees.pipeline_parallel * stages_per_rank(config)
    operations = token_operations(config, shape)
    layer, head = operations.layer, operations.head
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
    operations = token_operations(config, shape)
    costs = [operations.layer * count for count in layers_of_ranks(config, degrees, shape)]
    costs[-1] += operations.head
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
