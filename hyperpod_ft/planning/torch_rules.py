"""Engine torch's rules: its part of planning (planning/engine_rules.py says what each name is for)."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hyperpod_ft.config.instances import CATALOGUE, Instance
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning import torch_memory, torch_neuron_environment
from hyperpod_ft.planning.degrees import Degrees, divisors
from hyperpod_ft.planning.memory import Memory, stage_shares
from hyperpod_ft.planning.model_shape import ModelShape
from hyperpod_ft.planning.neuron_environment import NEURON_TOOLS
from hyperpod_ft.planning.packing_rules import check_packing

TRIAL_LAUNCHER: tuple[str, ...] = ()
MEMORY_SETTINGS: tuple[tuple[str, Any], ...] = (
    ("parallelism.sharding", "auto"),
    ("training.optimizer_state", "bf16"),
    ("parallelism.offload", "optimizer"),
    ("parallelism.offload", "parameters"),
)


def on_neuron(config: RunConfig) -> bool:
    """Whether it trains on Trainium, with TorchNeuron."""
    return CATALOGUE[config.cluster.instance_type].device == "neuron"


def precompiles(config: RunConfig) -> bool:
    """Trainium takes minutes for a graph, and compiles every operation outside of one too."""
    return on_neuron(config)


def generates_on_accelerators(config: RunConfig) -> bool:
    """Each answer grows by a token at a time, and Trainium would compile each length."""
    return not on_neuron(config)


def imports(config: RunConfig) -> tuple[str, ...]:
    return ("torch", "torch_neuronx") if on_neuron(config) else ("torch",)


def variables(config: RunConfig, cache: Path) -> dict[str, str]:
    return torch_neuron_environment.variables(config, cache)


def graph_settings(config: RunConfig) -> dict[str, str]:
    return torch_neuron_environment.graph_settings(config)


def environment_name(config: RunConfig) -> str:
    return "torch-neuron" if on_neuron(config) else "torch"


def packages_remedy(config: RunConfig) -> str:
    if on_neuron(config):
        return "set env.python to an interpreter that has TorchNeuron and the `torch` extra (docs/trainium.md)"
    return "install the `torch` extra there (pip install 'hyperpod-ft[torch]'), or remove env.python"


def program_directories(config: RunConfig, python: Path) -> tuple[Path, ...]:
    """TorchNeuron starts the compiler by name."""
    return (python.parent, NEURON_TOOLS) if on_neuron(config) else ()


def training_settings(config: RunConfig) -> dict[str, Any]:
    return {}


def default_tensor_parallel(instance: Instance, ranks: int) -> int:
    """On Trainium the cores of a chip, as AWS advises ("Best practices for training on AWS Neuron")."""
    return math.gcd(instance.tensor_parallel, ranks) if instance.device == "neuron" else 1


def check_degrees(config: RunConfig, degrees: Degrees) -> None:
    """All that divide the ranks can be trained."""


def check_family(config: RunConfig, family: str, degrees: Degrees) -> None:
    """Any family of transformers' causal models trains; packing needs one that keeps packed documents apart."""
    check_packing(config, family)


def check_model_config(model_config: Mapping[str, Any]) -> None:
    """transformers 5 reads every spelling of config.json."""


def check_kv_heads(tensor_parallel: int, kv_heads: int) -> None:
    """Key/value heads are not replicated."""
    if kv_heads % tensor_parallel:
        raise UserError(
            f"parallelism.tensor_parallel: {tensor_parallel} does not divide the model's {kv_heads} key/value heads,"
            " and engine torch does not replicate them",
            f"set it to {divisors(kv_heads)}",
        )


def check_shape(config: RunConfig, degrees: Degrees, shape: ModelShape) -> None:
    """Heads and MLP are all that is divided."""


def sharding(config: RunConfig, degrees: Degrees, shape: ModelShape | None) -> str:
    return torch_memory.explain(config, degrees, shape)


def step_memory(config: RunConfig, degrees: Degrees, shape: ModelShape) -> Iterator[Memory]:
    chosen = torch_memory.choose(config, degrees, shape)
    for share in stage_shares(config, degrees, shape):
        yield torch_memory.on_rank(config, degrees, shape, share, chosen)
