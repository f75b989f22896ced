"""Engine torch's rules: its part of planning (planning/engine_rules.py says what each name is for)."""

import math
from pathlib import Path
from typing import Any

from hyperpod_ft.config.instances import Instance
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.families import SEPARATING_FAMILIES
from hyperpod_ft.planning.layout import Degrees, Layout
from hyperpod_ft.planning.memory import Memory
from hyperpod_ft.planning.model_shape import ModelShape
from hyperpod_ft.planning.neuron import environment as neuron_environment
from hyperpod_ft.planning.torch import pipeline
from hyperpod_ft.planning.torch.memory import has_sequence_parallel, memory_of
from hyperpod_ft.planning.torch.sharding import choose_sharding, explain_sharding

TRIAL_LAUNCHER: tuple[str, ...] = ()
MEMORY_SETTINGS: tuple[tuple[str, Any], ...] = (
    ("parallelism.sharding", "auto"),
    ("training.optimizer_state", "bf16"),
    ("parallelism.offload", "optimizer"),
    ("parallelism.offload", "parameters"),
)


def precompiles(config: RunConfig) -> bool:
    """Trainium takes minutes for a graph, and compiles every operation outside of one too."""
    return config.instance.is_neuron


def generates_on_accelerators(config: RunConfig) -> bool:
    """Each answer grows by a token at a time, and Trainium would compile each length."""
    return not config.instance.is_neuron


def imports(config: RunConfig) -> tuple[str, ...]:
    return ("torch", "torch_neuronx") if config.instance.is_neuron else ("torch",)


def variables(config: RunConfig, cache: Path) -> dict[str, str]:
    return neuron_environment.torch_variables(config, cache)


def graph_settings(config: RunConfig) -> dict[str, str]:
    return neuron_environment.torch_graph_settings(config) | {"validates": str(config.dataset.validation_share > 0)}


def environment_name(config: RunConfig) -> str:
    return "torch-neuron" if config.instance.is_neuron else "torch"


def packages_remedy(config: RunConfig) -> str:
    if config.instance.is_neuron:
        return "set env.python to an interpreter that has TorchNeuron and the `torch` extra (docs/trainium.md)"
    return "install the `torch` extra there (pip install 'hyperpod-ft[torch]'), or remove env.python"


def program_directories(config: RunConfig, python: Path) -> tuple[Path, ...]:
    """TorchNeuron starts the compiler by name."""
    return (python.parent, neuron_environment.NEURON_TOOLS) if config.instance.is_neuron else ()


def default_tensor_parallel(instance: Instance, ranks: int) -> int:
    """On Trainium the cores of a chip, as AWS advises ("Best practices for training on AWS Neuron")."""
    return math.gcd(instance.tensor_parallel, ranks) if instance.is_neuron else 1


def layout(config: RunConfig, degrees: Degrees, family: str, shape: ModelShape | None) -> Layout:
    cut: list[range] = []
    if degrees.pipeline_parallel > 1:
        assert shape is not None, "families that can be cut have a known shape"
        cut = pipeline.cut(config, degrees, shape)
    return Layout(
        degrees,
        choose_sharding(config, degrees, shape),
        tuple((layers.start, layers.stop) for layers in cut),
        has_sequence_parallel(config, degrees),
        family in SEPARATING_FAMILIES,
    )


def sharding(config: RunConfig, degrees: Degrees, shape: ModelShape | None) -> str:
    return explain_sharding(config, degrees, shape)


def explain_pipeline(config: RunConfig, degrees: Degrees, shape: ModelShape) -> str | None:
    return pipeline.explain(config, degrees, shape) if degrees.pipeline_parallel > 1 else None


def step_memory(config: RunConfig, degrees: Degrees, shape: ModelShape) -> list[Memory]:
    memory, chosen = memory_of(config, degrees, shape), choose_sharding(config, degrees, shape)
    return [memory.on_rank(stage, chosen) for stage in memory.stages]
