"""Whether a run can train its model: packing, degrees and memory, checked as soon as config.json is available."""

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hyperpod_ft.config.instances import CATALOGUE
from hyperpod_ft.config.run_config import RunConfig, Training
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.memory import GIB, Memory, available, estimate
from hyperpod_ft.planning.model_shape import ModelShape, model_shape
from hyperpod_ft.planning.packing_rules import check_packing
from hyperpod_ft.planning.parallelism import Degrees, check_family, check_model, degrees

# a key of the run file to its new value
Change = dict[str, Any]


def check_model_directory(config: RunConfig, layout: Degrees, directory: Path) -> Memory | None:
    """Refuse a model on disk that cannot be packed, divided or fitted. Returns the memory it takes, where known.

    The memory is not known without accelerators, nor for families that are not built like Llama: those are left to
    the engine, which knows their attributes.
    """
    model_config = _read(directory)
    family = str(model_config.get("model_type", ""))
    check_packing(config, family)
    if config.engine == "neuron":
        check_family(family, layout)
    shape = model_shape(model_config)
    if shape is None:
        return None
    check_model(config, layout, shape)
    return check_memory(config, layout, shape)


def check_memory(config: RunConfig, layout: Degrees, shape: ModelShape) -> Memory | None:
    """What a training step takes on the fullest rank; None without accelerators.

    Raises UserError when that is more than there is, with the arithmetic and the least change that would fit.
    """
    room = available(config)
    if not room:
        return None
    memory = estimate(config, layout, shape)
    if memory.total <= room:
        return memory
    instance = CATALOGUE[config.cluster.instance_type]
    raise UserError(
        f"training.method {config.training.method}: takes {memory}, and {instance.name} has {room / GIB:.1f} of its"
        f" {instance.rank_gib:g} GiB for it",
        _remedy(config, shape, room),
    )


def _read(directory: Path) -> Mapping[str, Any]:
    file, remedy = directory / "config.json", "it has to be a Hugging Face model's directory"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"model.source: {file}: {reason}", remedy) from error
    if not isinstance(values, dict):
        raise UserError(f"model.source: {file}: holds no JSON object", remedy)
    return values


def _remedy(config: RunConfig, shape: ModelShape, room: float) -> str:
    """The least change that fits, by the weights of `_alternatives`; each is planned and estimated as the run was."""
    for change in _alternatives(config):
        changed = _changed(config, change)
        if changed is None:
            continue
        try:
            layout = degrees(changed)
            check_model(changed, layout, shape)
        except UserError:
            continue
        memory = estimate(changed, layout, shape)
        if memory.total <= room:
            settings = ", ".join(f"{key}: {str(value).lower()}" for key, value in change.items())
            return f"this would fit, with {memory.total / GIB:.1f} GiB: {settings}"
    return "choose a smaller model, or an instance type with more memory"


def _changed(config: RunConfig, change: Change) -> RunConfig | None:
    """The run file with other values; None where it refuses them."""
    values = config.model_dump()
    for key, value in change.items():
        section, name = key.split(".")
        values[section][name] = value
    try:
        return RunConfig.model_validate(values)
    except ValidationError:
        return None


def _alternatives(config: RunConfig) -> list[Change]:
    """Combinations of the changes that save memory, those that change least first."""
    weighed = []
    for chosen in itertools.product(*_choices(config)):
        change = {key: value for _, part in chosen for key, value in part.items()}
        if change:
            weighed.append((sum(weight for weight, _ in chosen), change))
    return [change for _, change in sorted(weighed, key=lambda pair: pair[0])]


def _choices(config: RunConfig) -> Iterator[list[tuple[int, Change]]]:
    """For each thing that may change: how it may, each with its weight.

    Weights rank what a user would rather do: pay time, then divide otherwise, then train less, then rent more.
    """
    training, neuron, layout = config.training, config.engine == "neuron", degrees(config)
    same: tuple[int, Change] = (0, {})
    if not training.gradient_checkpointing:
        yield [same, (1, {"training.gradient_checkpointing": True})]
    if neuron and not config.neuron.zero_1:
        yield [same, (1, {"neuron.zero_1": True})]
    if neuron and not config.neuron.sequence_parallel:
        yield [same, (1, {"neuron.sequence_parallel": True})]
    yield [same, *((2 + more, change) for more, change in enumerate(_smaller_micro_batches(training)))]
    larger = range(layout.tensor_parallel + 1, layout.ranks_per_node + 1)
    divisors = [degree for degree in larger if layout.ranks_per_node % degree == 0]
    yield [same, *((4 + more, {"parallelism.tensor_parallel": degree}) for more, degree in enumerate(divisors))]
    if neuron:
        stages = [layout.pipeline_parallel * factor for factor in (2, 4, 8)]
        yield [same, *((12 + more, {"parallelism.pipeline_parallel": count}) for more, count in enumerate(stages))]
    if training.method == "full":
        yield [same, (24, {"training.method": "lora"})]
    nodes = [layout.nodes * factor for factor in (2, 4, 8)]
    yield [same, *((48 + more, {"cluster.nodes": count}) for more, count in enumerate(nodes))]


def _smaller_micro_batches(training: Training) -> Iterator[Change]:
    """Halved again and again, with as many rows in a step."""
    rows = training.micro_batch_size * training.gradient_accumulation_steps
    size = training.micro_batch_size // 2
    while size:
        if rows % size == 0:
            yield {"training.micro_batch_size": size, "training.gradient_accumulation_steps": rows // size}
        size //= 2
