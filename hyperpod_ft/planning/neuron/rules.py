"""Engine neuron's rules: its part of planning (planning/engine_rules.py says what each name is for)."""

import math
from pathlib import Path
from typing import Any

from hyperpod_ft.config.instances import Instance
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.layout import Degrees, Layout, Sharding
from hyperpod_ft.planning.memory import Memory
from hyperpod_ft.planning.model_shape import ModelShape
from hyperpod_ft.planning.neuron import environment as neuron_environment
from hyperpod_ft.planning.neuron.memory import NeuronMemory

TRIAL_LAUNCHER: tuple[str, ...] = ("neuron_parallel_compile",)
MEMORY_SETTINGS: tuple[tuple[str, Any], ...] = (("neuron.zero_1", True), ("neuron.sequence_parallel", True))


def precompiles(config: RunConfig) -> bool:
    return True


def generates_on_accelerators(config: RunConfig) -> bool:
    return False


def imports(config: RunConfig) -> tuple[str, ...]:
    """On PyPI, packages of these names are empty."""
    return "torch", "neuronxcc", "libneuronxla", "torch_neuronx", "neuronx_distributed", "optimum.neuron"


def variables(config: RunConfig, cache: Path) -> dict[str, str]:
    return neuron_environment.variables(config, cache)


def graph_settings(config: RunConfig) -> dict[str, str]:
    return neuron_environment.graph_settings(config)


def environment_name(config: RunConfig) -> str:
    return f"neuron-{config.env.sdk}"


def packages_remedy(config: RunConfig) -> str:
    if config.env.python:
        return "install the Neuron packages there, or remove env.python"
    return "name AWS's Neuron repository in env.package_repositories: packages of these names on PyPI are empty"


def program_directories(config: RunConfig, python: Path) -> tuple[Path, ...]:
    """torch_neuronx starts the compiler by name."""
    return (python.parent, neuron_environment.NEURON_TOOLS)


def default_tensor_parallel(instance: Instance, ranks: int) -> int:
    return math.gcd(instance.tensor_parallel, ranks)


def layout(config: RunConfig, degrees: Degrees, family: str, shape: ModelShape | None) -> Layout:
    """What optimum-neuron does with the run file: it uses ZeRO-1 with bf16 only, as planning/neuron/memory.py says."""
    zero1 = config.neuron.zero_1 and config.training.precision == "bf16" and degrees.data_parallel > 1
    sharding = Sharding("zero1", degrees.data_parallel) if zero1 else Sharding("replicated", 1)
    return Layout(degrees, sharding, sequence_parallel=config.neuron.sequence_parallel)


def sharding(config: RunConfig, degrees: Degrees, shape: ModelShape | None) -> str:
    return str(layout(config, degrees, "", shape).sharding)


def explain_pipeline(config: RunConfig, degrees: Degrees, shape: ModelShape) -> str | None:
    """Nothing to explain: neuronx-distributed cuts the model itself, by numbers of layers."""
    return None


def step_memory(config: RunConfig, degrees: Degrees, shape: ModelShape) -> list[Memory]:
    memory = NeuronMemory(config, degrees, shape)
    return [memory.on_rank(stage) for stage in memory.stages]
