"""Engine neuron's rules: its part of planning (planning/engine_rules.py says what each name is for)."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyperpod_ft.config.fields import shown
from hyperpod_ft.config.instances import Instance
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.degrees import Degrees, check_divides, copies_over_tensor, listed_divisors
from hyperpod_ft.planning.lora_targets import target_names
from hyperpod_ft.planning.memory import Memory
from hyperpod_ft.planning.model_shape import ModelShape
from hyperpod_ft.planning.neuron import environment as neuron_environment
from hyperpod_ft.planning.neuron.memory import NeuronMemory

TRIAL_LAUNCHER: tuple[str, ...] = ("neuron_parallel_compile",)
MEMORY_SETTINGS: tuple[tuple[str, Any], ...] = (("neuron.zero_1", True), ("neuron.sequence_parallel", True))

_FAMILIES = ("llama", "qwen3", "granite")  # those that optimum-neuron 0.4.5 trains; granite without a pipeline
# Settings that change no result, only how checkpoints are written and graphs are compiled.
_RESULT_UNCHANGED = {"xser", "precompile_steps"}


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


def training_settings(config: RunConfig) -> dict[str, Any]:
    return config.neuron.model_dump(exclude=_RESULT_UNCHANGED)


def default_tensor_parallel(instance: Instance, ranks: int) -> int:
    return math.gcd(instance.tensor_parallel, ranks)


def check_degrees(config: RunConfig, degrees: Degrees) -> None:
    if degrees.tensor_parallel > 1:
        _check_groups(config, degrees)
        _check_sequence_parallel(config, degrees)


def _check_groups(config: RunConfig, degrees: Degrees) -> None:
    """Refuse degrees whose groups of ranks neuronx-distributed cannot make.

    Read in its parallel_layers/parallel_state.py, versions 0.15 and 0.17; not tried on Trainium.
    """
    trn1 = config.instance.name.startswith("trn1")
    if trn1 and degrees.tensor_parallel == 4 and degrees.nodes % degrees.pipeline_parallel:
        # initialize_model_parallel reshapes the ranks to (PP, DP // groups of a node, 1, 4, groups of a node)
        raise UserError(
            f"parallelism.pipeline_parallel: {degrees.pipeline_parallel} does not divide cluster.nodes {degrees.nodes},"
            " as neuronx-distributed requires on trn1 with tensor_parallel 4",
            f"set it to {listed_divisors(degrees.nodes)}, or choose another tensor_parallel",
        )
    if degrees.tensor_parallel == 64 and config.env.python is None and config.env.sdk == "2.26.1":
        # ascending_descending_ring_PG_group in 0.15 makes two groups on each node, and asserts that there is one
        raise UserError(
            "parallelism.tensor_parallel: neuronx-distributed of Neuron SDK 2.26.1 fails with 64 on trn2",
            "set it to 32, or set env.sdk to 2.28.0",
        )


def _check_sequence_parallel(config: RunConfig, degrees: Degrees) -> None:
    """Sequence parallelism divides each row, and bf16 with tensor parallelism needs it."""
    tensor_parallel, length = degrees.tensor_parallel, config.dataset.max_length
    if config.neuron.sequence_parallel:
        if length % tensor_parallel:
            raise UserError(
                f"neuron.sequence_parallel: tensor_parallel {tensor_parallel} does not divide dataset.max_length"
                f" {length}",
                f"set dataset.max_length to {math.ceil(length / tensor_parallel) * tensor_parallel},"
                f" or tensor_parallel to {listed_divisors(math.gcd(length, degrees.ranks_per_node))}",
            )
    elif config.training.precision == "bf16":
        # NxD's column-parallel backward pass sums an fp32 copy of the input's gradient, then continues with the tensor
        # that was not summed (parallel_layers/layers_utils.py, _linear_autograd_bwd_grad_reduce)
        raise UserError(
            "neuron.sequence_parallel: without it, neuronx-distributed loses part of the bf16 gradients on"
            f" {tensor_parallel} tensor-parallel ranks",
            "set it to true, or set training.precision to fp32",
        )


def check_family(config: RunConfig, family: str, degrees: Degrees) -> None:
    if family not in _FAMILIES:
        raise UserError(
            f"model.source: engine neuron cannot train models of type {shown(family)}",
            f"choose a model of type {', '.join(_FAMILIES)}",
        )
    if family == "granite" and degrees.pipeline_parallel > 1:
        raise UserError(
            "parallelism.pipeline_parallel: optimum-neuron has no pipeline for granite models", "set it to 1"
        )


def check_model_config(model_config: Mapping[str, Any], degrees: Degrees) -> None:
    """Refuse a config.json whose RoPE transformers 4.57, of engine neuron, would silently replace by the default.

    transformers 5 writes `rope_parameters` instead of `rope_theta` and `rope_scaling`. It reads both.
    """
    if "rope_parameters" in model_config and "rope_theta" not in model_config:
        raise UserError(
            "model.source: config.json has rope_parameters of transformers 5, which engine neuron's 4.57 ignores",
            "repeat them there as rope_theta, and as rope_scaling unless rope_type is default",
        )


def check_kv_heads(tensor_parallel: int, kv_heads: int) -> None:
    """Key/value heads are replicated when there are fewer than ranks."""
    if kv_heads * copies_over_tensor(kv_heads, tensor_parallel) % tensor_parallel:
        raise UserError(
            f"parallelism.tensor_parallel: {tensor_parallel} and the model's {kv_heads} key/value heads:"
            " neither divides the other",
            f"choose a divisor or a multiple of {kv_heads}",
        )


def check_shape(config: RunConfig, degrees: Degrees, shape: ModelShape) -> None:
    check_divides(degrees, "vocabulary", shape.vocabulary)
    if shape.biases:
        raise UserError(
            "model.source: its linear layers have biases, which optimum-neuron does not support", "use another model"
        )
    if config.neuron.fuse_qkv and shape.heads != shape.kv_heads:
        raise UserError(
            f"neuron.fuse_qkv: needs equal numbers of heads, and the model has {shape.heads} query heads and"
            f" {shape.kv_heads} key/value heads",
            "set it to false",
        )
    targets = target_names(config.lora, shape.model_type)
    attention = {"q_proj", "k_proj", "v_proj"}
    fused = shape.kv_heads % degrees.tensor_parallel != 0
    if config.training.method == "lora" and fused and attention & targets and not attention <= targets:
        raise UserError(
            "lora.target_modules: q_proj, k_proj and v_proj are one module on engine neuron when"
            f" {shape.kv_heads} key/value heads are on {degrees.tensor_parallel} ranks",
            "name all three or none of them",
        )


def sharding(config: RunConfig, degrees: Degrees, shape: ModelShape | None) -> str:
    """optimum-neuron uses ZeRO-1 with bf16 only, as planning/neuron/memory.py says."""
    if config.neuron.zero_1 and config.training.precision == "bf16" and degrees.data_parallel > 1:
        return f"zero1 over {degrees.data_parallel} ranks"
    return "replicated"


def explain_pipeline(config: RunConfig, degrees: Degrees, shape: ModelShape) -> str | None:
    """Nothing to explain: neuronx-distributed cuts the model itself, by numbers of layers."""
    return None


def step_memory(config: RunConfig, degrees: Degrees, shape: ModelShape) -> list[Memory]:
    memory = NeuronMemory(config, degrees, shape)
    return [memory.on_rank(stage) for stage in memory.stages]
