"""Engine torch's rules: its part of planning (planning/engine_rules.py says what each name is for).

Environment variables are from AWS's documentation of Neuron 2.33, "TorchNeuron environment variables", and for the
caches from torch-neuronx's own code; they must be set before torch is imported, which loads torch-neuronx.
"""

import hashlib
import math
from pathlib import Path
from typing import Any

from hyperpod_ft.config.instances import Instance
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning import trainium
from hyperpod_ft.planning.layout import Degrees, Layout
from hyperpod_ft.planning.memory import Memory
from hyperpod_ft.planning.model_shape import ModelShape
from hyperpod_ft.planning.torch import pipeline
from hyperpod_ft.planning.torch.limits import check_whole_weights
from hyperpod_ft.planning.torch.memory import has_sequence_parallel
from hyperpod_ft.planning.torch.sharding import choose_sharding, explain_sharding
from hyperpod_ft.planning.torch.step_memory import memory_of
from hyperpod_ft.shipped import installing

TRIAL_LAUNCHER: tuple[str, ...] = ()
MEMORY_SETTINGS: tuple[tuple[str, Any], ...] = (
    ("parallelism.sharding", "auto"),
    ("training.optimizer_state", "bf16"),
    ("parallelism.offload", "optimizer"),
    ("parallelism.offload", "parameters"),
)
_COMPILER_VARIABLES = ("NEURON_", "TORCH_NEURONX_")


def continues_elsewhere(config: RunConfig) -> bool:
    """Every layout reads the checkpoints of every other, with two exceptions.

    Each rank draws its own dropout masks. Moments in int8 have a scale for each block of columns, and tensor
    parallelism may cut a block in two.
    """
    dropout = config.lora.dropout if config.training.method == "lora" else 0.0
    return not dropout and config.training.optimizer_state != "int8"


def precompiles(config: RunConfig) -> bool:
    """Trainium takes minutes for a graph, and compiles every operation outside of one too."""
    return config.instance.is_neuron


def generates_on_accelerators(config: RunConfig) -> bool:
    """Each answer grows by a token at a time, and Trainium would compile each length."""
    return not config.instance.is_neuron


def imports(config: RunConfig) -> tuple[str, ...]:
    return ("torch", "torch_neuronx") if config.instance.is_neuron else ("torch",)


def variables(config: RunConfig, cache: Path | None) -> dict[str, str]:
    """Of Trainium: locks and intermediate files stay on the node, in directories for this cache alone.

    The defaults are the same for all users of a node, and only the first could write there.
    """
    if cache is None:
        return {}
    digest = hashlib.sha256(bytes(cache)).hexdigest()[:12]
    local = Path("/tmp") / f"hyperpod-ft-{digest}"  # noqa: S108 - a shared volume may have no file locks
    given, found = config.cluster.environment, trainium.node_settings(config)
    return {name: value for name, value in found.items() if name not in given} | {
        "TORCH_NEURONX_NEFF_CACHE_DIR": str(cache),
        "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": str(local / "locks"),
        "TORCH_NEURONX_DEBUG_DIR": str(local / "compiler"),
    }


def graph_settings(config: RunConfig) -> dict[str, str]:
    found = trainium.node_settings(config) | config.cluster.environment
    chosen = {name: value for name, value in found.items() if name.startswith(_COMPILER_VARIABLES)}
    return chosen | {"validates": str(config.dataset.validates)}


def certified_settings(config: RunConfig) -> dict[str, Any]:
    return {}


def environment_name(config: RunConfig) -> str:
    return "torch-neuron" if config.instance.is_neuron else "torch"


def packages_remedy(config: RunConfig) -> str:
    if config.instance.is_neuron:
        return "set env.python to an interpreter that has TorchNeuron and the `torch` extra (docs/engines.md)"
    return f"install the `torch` extra there ({installing('torch')}), or remove env.python"


def program_directories(config: RunConfig, python: Path) -> tuple[Path, ...]:
    """TorchNeuron starts the compiler by name."""
    return (python.parent, trainium.NEURON_TOOLS) if config.instance.is_neuron else ()


def default_tensor_parallel(instance: Instance, ranks: int) -> int:
    """On Trainium the cores of a chip, as AWS advises ("Best practices for training on AWS Neuron")."""
    return math.gcd(instance.tensor_parallel, ranks) if instance.is_neuron else 1


def layout(config: RunConfig, degrees: Degrees, shape: ModelShape | None) -> Layout:
    cut: list[range] = []
    if degrees.pipeline_parallel > 1:
        if shape is None:
            raise UserError(
                "parallelism.pipeline_parallel: the model's config.json leaves sizes to the defaults of its class, so"
                " that it cannot be cut",
                "set it to 1",
            )
        cut = pipeline.cut(config, degrees, shape)
    chosen = choose_sharding(config, degrees, shape)
    check_whole_weights(config, degrees, chosen)
    return Layout(
        degrees,
        chosen,
        tuple((layers.start, layers.stop) for layers in cut),
        has_sequence_parallel(config, degrees),
    )


def sharding(config: RunConfig, degrees: Degrees, shape: ModelShape | None) -> str:
    return explain_sharding(config, degrees, shape)


def explain_pipeline(config: RunConfig, degrees: Degrees, shape: ModelShape) -> str | None:
    return pipeline.explain(config, degrees, shape) if degrees.pipeline_parallel > 1 else None


def step_memory(config: RunConfig, degrees: Degrees, shape: ModelShape) -> list[Memory]:
    memory, chosen = memory_of(config, degrees, shape), choose_sharding(config, degrees, shape)
    return [memory.on_rank(stage, chosen) for stage in memory.stages]
