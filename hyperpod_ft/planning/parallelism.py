"""Degrees of parallelism and the ranks they need. Errors show the arithmetic of what does not divide."""

import math
from dataclasses import dataclass

from hyperpod_ft.config.fields import shown
from hyperpod_ft.config.instances import CATALOGUE, Instance
from hyperpod_ft.config.run_config import EngineName, RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.model_shape import ModelShape

_NEURON_FAMILIES = ("llama", "qwen3", "granite")  # those that optimum-neuron 0.4.5 trains; granite without a pipeline


@dataclass(frozen=True)
class Degrees:
    """How `nodes * ranks_per_node` processes divide into data-, tensor- and pipeline-parallel groups."""

    nodes: int
    ranks_per_node: int
    tensor_parallel: int
    pipeline_parallel: int

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def data_parallel(self) -> int:
        return self.world_size // (self.tensor_parallel * self.pipeline_parallel)


def degrees_of(config: RunConfig) -> Degrees:
    """The degrees of a run. Raises UserError when they do not divide the nodes' ranks, or a row's tokens."""
    instance = CATALOGUE[config.cluster.instance_type]
    given = config.parallelism
    ranks = given.ranks_per_node or instance.ranks
    if ranks is None:
        raise UserError(
            f"parallelism.ranks_per_node: required with instance type {instance.name}",
            "set it, for example to 2",
        )
    if instance.ranks is not None and ranks > instance.ranks:
        raise UserError(
            f"parallelism.ranks_per_node: {ranks} is more than the {instance.ranks} ranks of {instance.name}",
            f"set it to {instance.ranks} or leave it out",
        )
    tensor_parallel = given.tensor_parallel or _default_tensor_parallel(config, instance, ranks)
    result = Degrees(config.cluster.nodes, ranks, tensor_parallel, given.pipeline_parallel)
    model_ranks = result.tensor_parallel * result.pipeline_parallel
    if result.world_size % model_ranks:
        raise UserError(
            f"parallelism: tensor_parallel {result.tensor_parallel} x pipeline_parallel {result.pipeline_parallel}"
            f" = {model_ranks} does not divide {result.nodes} nodes x {ranks} ranks = {result.world_size}",
            "change one of them",
        )
    if ranks % result.tensor_parallel:
        raise UserError(
            f"parallelism.tensor_parallel: {result.tensor_parallel} does not divide the {ranks} ranks of a node,"
            " so a tensor-parallel group would span nodes",
            "choose a divisor",
        )
    if config.engine == "neuron" and tensor_parallel > 1:
        _check_sequence_parallel(config, tensor_parallel)
    return result


def _default_tensor_parallel(config: RunConfig, instance: Instance, ranks: int) -> int:
    return math.gcd(instance.tensor_parallel, ranks) if config.engine == "neuron" else 1


def _check_sequence_parallel(config: RunConfig, tensor_parallel: int) -> None:
    length = config.dataset.max_length
    if config.neuron.sequence_parallel:
        if length % tensor_parallel:
            raise UserError(
                f"neuron.sequence_parallel: tensor_parallel {tensor_parallel} does not divide dataset.max_length"
                f" {length}",
                "change one of them",
            )
    elif config.training.precision == "bf16":
        # NxD's column-parallel backward pass sums an fp32 copy of the input's gradient, then continues with the tensor
        # that was not summed (parallel_layers/layers_utils.py, _linear_autograd_bwd_grad_reduce)
        raise UserError(
            "neuron.sequence_parallel: without it, neuronx-distributed loses part of the bf16 gradients on"
            f" {tensor_parallel} tensor-parallel ranks",
            "set it to true, or set training.precision to fp32",
        )


def kv_size_multiplier(kv_heads: int, tensor_parallel: int) -> int:
    """How many copies of each key/value head a tensor-parallel group of engine neuron has.

    optimum-neuron's rule, `TrainingNeuronConfig.auto_kv_size_multiplier`: one, unless there are more ranks than heads.
    """
    return max(1, tensor_parallel // kv_heads)


def check_model(config: RunConfig, degrees: Degrees, shape: ModelShape) -> None:
    """Raise UserError for degrees that do not divide the model, and settings that its heads do not allow."""
    check_heads(config.engine, degrees.tensor_parallel, shape.heads, shape.kv_heads)
    divided = {"intermediate size": shape.intermediate}
    if config.engine == "neuron":
        divided["vocabulary"] = shape.vocabulary
    for what, width in divided.items():
        if width % degrees.tensor_parallel:
            raise UserError(
                f"parallelism.tensor_parallel: {degrees.tensor_parallel} does not divide the model's {what} {width}",
                "choose a divisor",
            )
    if shape.layers < degrees.pipeline_parallel:
        raise UserError(
            f"parallelism.pipeline_parallel: {degrees.pipeline_parallel} stages for {shape.layers} layers",
            f"set it to at most {shape.layers}",
        )
    if config.engine == "neuron":
        check_family(shape.family, degrees)
        _check_neuron(config, degrees, shape)


def check_heads(engine: EngineName, tensor_parallel: int, heads: int, kv_heads: int) -> None:
    """Raise UserError for a degree that does not divide the attention heads.

    Engine `torch` does not replicate key/value heads, so they must be divisible; engine `neuron` replicates them.
    """
    if heads % tensor_parallel:
        raise UserError(
            f"parallelism.tensor_parallel: {tensor_parallel} does not divide the model's {heads} attention heads",
            "choose a divisor",
        )
    if engine == "torch" and kv_heads % tensor_parallel:
        raise UserError(
            f"parallelism.tensor_parallel: {tensor_parallel} does not divide the model's {kv_heads} key/value heads,"
            " and engine torch does not replicate them",
            f"choose a divisor of {kv_heads}",
        )
    if engine == "neuron" and kv_heads * kv_size_multiplier(kv_heads, tensor_parallel) % tensor_parallel:
        raise UserError(
            f"parallelism.tensor_parallel: {tensor_parallel} and the model's {kv_heads} key/value heads:"
            " neither divides the other",
            "choose a divisor or a multiple of the heads",
        )


def check_family(family: str, degrees: Degrees) -> None:
    """Raise UserError for a model that engine neuron cannot train. `family` is config.json's model_type."""
    if family not in _NEURON_FAMILIES:
        raise UserError(
            f"model.source: engine neuron cannot train models of type {shown(family)}",
            f"choose a model of type {', '.join(_NEURON_FAMILIES)}",
        )
    if family == "granite" and degrees.pipeline_parallel > 1:
        raise UserError("parallelism.pipeline_parallel: optimum-neuron has none for granite", "set it to 1")


def _check_neuron(config: RunConfig, degrees: Degrees, shape: ModelShape) -> None:
    if shape.qkv_bias or shape.output_bias or shape.mlp_bias:
        raise UserError(
            "model.source: its linear layers have biases, which optimum-neuron does not support", "use another model"
        )
    if config.neuron.fuse_qkv and shape.heads != shape.kv_heads:
        raise UserError(
            f"neuron.fuse_qkv: needs equal numbers of heads, and the model has {shape.heads} query heads and"
            f" {shape.kv_heads} key/value heads",
            "set it to false",
        )
    targets = {target.rpartition(".")[2] for target in config.lora.target_modules}
    attention = {"q_proj", "k_proj", "v_proj"}
    fused = shape.kv_heads % degrees.tensor_parallel != 0
    if config.training.method == "lora" and fused and attention & targets and not attention <= targets:
        raise UserError(
            "lora.target_modules: q_proj, k_proj and v_proj are one module on engine neuron when"
            f" {shape.kv_heads} key/value heads are on {degrees.tensor_parallel} ranks",
            "name all three or none of them",
        )
