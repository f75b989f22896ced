"""Engine neuron's rules: its part of planning (planning/engine_rules.py says what each name is for).

Environment variables are those of Hugging Face's and AWS's fine-tuning scripts for optimum-neuron, unless a comment
says why not.
"""

import math
from pathlib import Path
from typing import Any

from hyperpod_ft.config.instances import Instance
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning import trainium
from hyperpod_ft.planning.layout import Degrees, Layout, Sharding
from hyperpod_ft.planning.memory import Memory
from hyperpod_ft.planning.model_shape import ModelShape
from hyperpod_ft.planning.neuron.memory import NeuronMemory

TRIAL_LAUNCHER: tuple[str, ...] = ("neuron_parallel_compile",)
MEMORY_SETTINGS: tuple[tuple[str, Any], ...] = (("neuron.zero_1", True), ("neuron.sequence_parallel", True))


def continues_elsewhere(config: RunConfig) -> bool:
    """A rank reads the file that the rank of its number wrote (engines/neuron/checkpoints.py)."""
    return False


def precompiles(config: RunConfig) -> bool:
    return True


def generates_on_accelerators(config: RunConfig) -> bool:
    return False


def imports(config: RunConfig) -> tuple[str, ...]:
    """On PyPI, packages of these names are empty."""
    return "torch", "neuronxcc", "libneuronxla", "torch_neuronx", "neuronx_distributed", "optimum.neuron"


def variables(config: RunConfig, cache: Path | None) -> dict[str, str]:
    """The cache's directory is always added to NEURON_CC_FLAGS, whatever `cluster.environment` sets there.

    Without it, optimum-neuron looks for compiled graphs on each node's local disk.
    """
    given = config.cluster.environment
    chosen = {name: value for name, value in _defaults(config).items() if name not in given}
    flags = given.get("NEURON_CC_FLAGS") or " ".join(_compiler_flags(config))
    return chosen | {
        "NEURON_CC_FLAGS": " ".join([flags, *_grouping(config), f"--cache_dir={cache}"]),
        "NEURON_COMPILE_CACHE_URL": str(cache),
    }


def graph_settings(config: RunConfig) -> dict[str, str]:
    given = {name: value for name, value in config.cluster.environment.items() if name.startswith(("NEURON_", "XLA_"))}
    defaults = {name: value for name, value in _defaults(config).items() if name.startswith("NEURON_")}
    return {"NEURON_CC_FLAGS": " ".join(_compiler_flags(config))} | defaults | given


def _compiler_flags(config: RunConfig) -> list[str]:
    flags = [
        "--model-type transformer",
        # the mask's infinities become the largest finite numbers; they would become NaN
        "--enable-saturate-infinity",
        # an earlier failure may have been lack of memory or a kill
        "--retry_failed_compilation",
    ]
    if config.neuron.zero_1:
        flags.append("--distribution-strategy=llm-training")
    return flags


def _grouping(config: RunConfig) -> list[str]:
    """Must agree with the runtime's setting in `node_settings`, even if the user sets other flags."""
    lnc = config.instance.cores_per_rank
    return [f"--lnc={lnc}"] if lnc > 1 else []


def _defaults(config: RunConfig) -> dict[str, str]:
    rounding = config.neuron.stochastic_rounding and config.training.precision == "bf16"
    found = {
        "NEURON_FUSE_SOFTMAX": "1",
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "3",
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": str(int(rounding)),
        # the same on all ranks, so that copies of a value are rounded alike
        "NEURON_RT_STOCHASTIC_ROUNDING_SEED": "0",
    }
    return found | trainium.node_settings(config)


def certified_settings(config: RunConfig) -> dict[str, Any]:
    return {}


def environment_name(config: RunConfig) -> str:
    return f"neuron-{config.env.sdk}"


def packages_remedy(config: RunConfig) -> str:
    if config.env.python:
        return "install the Neuron packages there, or remove env.python"
    return "name AWS's Neuron repository in env.package_repositories: packages of these names on PyPI are empty"


def program_directories(config: RunConfig, python: Path) -> tuple[Path, ...]:
    """torch_neuronx starts the compiler by name."""
    return (python.parent, trainium.NEURON_TOOLS)


def default_tensor_parallel(instance: Instance, ranks: int) -> int:
    return math.gcd(instance.tensor_parallel, ranks)


def layout(config: RunConfig, degrees: Degrees, shape: ModelShape | None) -> Layout:
    """What optimum-neuron does with the run file: it uses ZeRO-1 with bf16 only, as planning/neuron/memory.py says."""
    zero1 = config.neuron.zero_1 and config.training.precision == "bf16" and degrees.data_parallel > 1
    sharding = Sharding("zero1", degrees.data_parallel) if zero1 else Sharding("replicated", 1)
    return Layout(degrees, sharding, sequence_parallel=config.neuron.sequence_parallel)


def sharding(config: RunConfig, degrees: Degrees, shape: ModelShape | None) -> str:
    return str(layout(config, degrees, shape).sharding)


def explain_pipeline(config: RunConfig, degrees: Degrees, shape: ModelShape) -> str | None:
    """Nothing to explain: neuronx-distributed cuts the model itself, by numbers of layers."""
    return None


def step_memory(config: RunConfig, degrees: Degrees, shape: ModelShape) -> list[Memory]:
    memory = NeuronMemory(config, degrees, shape)
    return [memory.on_rank(stage) for stage in memory.stages]
