"""Which layers each stage of a pipeline has: so that all compute about as long."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hyperpod_ft.config.fields import shown
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.degrees import Degrees
from hyperpod_ft.planning.families import divisible_types, family_of
from hyperpod_ft.planning.model_shape import ModelShape
from hyperpod_ft.planning.pipeline.schedule import idle_share, stages_of, stages_per_rank


@dataclass(frozen=True)
class Work:
    """What decides how long the parts of a model compute."""

    layers: int
    matrices: int  # elements of those of a layer
    queries: int  # width of all query heads together
    head: int  # elements of the output matrix


def work_of_shape(shape: ModelShape) -> Work:
    """That of a model whose memory is known."""
    matrices = sum(inputs * outputs for inputs, outputs in shape.linears.values())
    return Work(shape.layers, matrices, shape.queries, shape.vocabulary * shape.hidden)


def work_of(model_config: Mapping[str, Any]) -> Work:
    """That of any model that can be cut, from its config.json. Raises UserError when that lacks a size."""
    family = family_of(str(model_config.get("model_type", "")))
    assert family is not None, "check_family has passed"

    def size(key: str, default: int | None = None) -> int:
        value = model_config.get(family.keys.get(key, key))
        if value is None and default is not None:
            return default
        if type(value) is not int or value < 1:
            raise UserError(
                f"model.source: config.json has no valid {family.keys.get(key, key)}, by which a pipeline is cut",
                "correct it, or set parallelism.pipeline_parallel to 1",
            )
        return value

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    head_dim = size("head_dim", hidden // heads)
    queries, keys = heads * head_dim, size("num_key_value_heads", heads) * head_dim
    before = sum(part == "units" for parts in family.columns.values() for part in parts)
    mlp = (before + 1) * hidden * size("intermediate_size", 4 * hidden)  # 4: what GPT-2's classes take
    attention = hidden * (queries + 2 * keys) + queries * hidden
    return Work(size("num_hidden_layers"), attention + mlp, queries, size("vocab_size") * hidden)


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
    targets = config.lora.target_names
    if degrees.pipeline_parallel > 1 and config.training.method == "lora" and not shape.linears.keys() & targets:
        raise UserError(
            "lora.target_modules: has no module of the layers, so that pipeline stages would train nothing",
            "name some, or set parallelism.pipeline_parallel to 1",
        )


def cut(config: RunConfig, degrees: Degrees, work: Work) -> list[range]:
    """The layers of each stage, so that the slowest has as few operations as possible; each has at least one.

    The last stage has the output matrix too. An embedding is looked up, which is not counted. Of equal stages the later
    ones get the layers left over, since earlier ones keep more micro batches in memory.
    """
    stages = degrees.pipeline_parallel * stages_per_rank(config)
    layer, head = _operations(config, work)
    counts = [1] * stages
    for _ in range(work.layers - stages):
        costs = [layer * (count + 1) + head * (stage == stages - 1) for stage, count in enumerate(counts)]
        counts[min(range(stages), key=lambda stage: (costs[stage], -stage))] += 1
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def layers_of_ranks(config: RunConfig, degrees: Degrees, work: Work) -> list[int]:
    """How many layers each rank of the pipeline has, in all its stages."""
    stages = cut(config, degrees, work)
    return [
        sum(len(stages[stage]) for stage in stages_of(rank, config, degrees))
        for rank in range(degrees.pipeline_parallel)
    ]


def explain(config: RunConfig, degrees: Degrees, model_config: Mapping[str, Any]) -> str:
    """Schedule, layers of each rank, and what is lost, in one line. Raises UserError for more stages than layers."""
    work = work_of(model_config)
    check_layers(config, degrees, work.layers)
    stages = cut(config, degrees, work)
    layer, head = _operations(config, work)
    costs = [layer * count for count in layers_of_ranks(config, degrees, work)]
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


def _operations(config: RunConfig, work: Work) -> tuple[float, float]:
    """Operations on a token in one layer, and in the output matrix: forward, backward, and what is computed again.

    2 for each element of a matrix forward, 2 for the gradient of its input, and 2 for its own if it is trained;
    attention over T positions and a width q of all query heads has 4 q T forward and twice that backward.
    """
    training = config.training
    trained, again = training.method == "full", training.activation_checkpointing == "full"
    attention = 4 * work.queries * config.dataset.max_length
    forward = 2 * work.matrices + attention
    backward = 2 * work.matrices * (1 + trained) + 2 * attention
    layer = forward * (1 + again / training.activation_checkpointing_every) + backward
    return layer, 2 * work.head * (2 + trained)
