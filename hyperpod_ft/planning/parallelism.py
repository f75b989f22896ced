"""Degrees of parallelism and the ranks they need; a combination that cannot divide is refused with its arithmetic."""

import math
from dataclasses import dataclass

from hyperpod_ft.config.instances import CATALOGUE, Instance
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.model_shape import ModelShape

_NEURON_FAMILIES = ("llama", "qwen3", "granite")  # what optimum-neuron 0.4.5 trains; granite in no pipeline


@dataclass(frozen=True)
class Degrees:
    """How `nodes * ranks_per_node` processes divide into data, tensor and pipeline parallel groups."""

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
    """The degrees of a run. Raises UserError when they do not divide the ranks of the nodes, or the rows."""
    instance = CATALOGUE[config.cluster.instance_type]
    wanted = config.parallelism
    ranks = wanted.ranks_per_node or instance.ranks
    if ranks is None:
        raise UserError(
            f"parallelism.ranks_per_node: instance type {instance.name} does not say how many processes to run",
            "set it, for example to 2",
        )
    if instance.ranks is not None and ranks > instance.ranks:
        raise UserError(
            f"parallelism.ranks_per_node: {ranks} ranks on {instance.name}, which has {instance.ranks}",
            f"set it to {instance.ranks} or leave it out",
        )
    tensor_parallel = wanted.tensor_parallel or _usual_tensor_parallel(config, instance, ranks)
    result = Degrees(config.cluster.nodes, ranks, tensor_parallel, wanted.pipeline_parallel)
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


def _usual_tensor_parallel(config: RunConfig, instance: Instance, ranks: int) -> int:
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
        # NxD's column-parallel backward pass sums an fp32 copy of the input's gradient, and goes on with what was not
        # summed (parallel_layers/layers_utils.py, _linear_autograd_bwd_grad_reduce)
        raise UserError(
            "neuron.sequence_parallel: without it neuronx-distributed loses gradients of bf16 over"
            f" {tensor_parallel} tensor-parallel ranks",
            "set it to true, or training.precision to fp32",
        )


def kv_size_multiplier(kv_heads: int, tensor_parallel: int) -> int:
    """How many copies of each key/value head engine neuron spreads over a tensor-parallel group.

    optimum-neuron's rule, `TrainingNeuronConfig.auto_kv_size_multiplier`: one, unless ranks outnumber the heads.
    """
    return max(1, tensor_parallel // kv_heads)


def check_model(config: RunConfig, degrees: Degrees, shape: ModelShape) -> None:
    """Refuse degrees that the model cannot be divided by, and settings that its heads do not allow."""
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
            f"choose at most {shape.layers}",
        )
    if config.engine == "neuron":
        check_family(shape.family, degrees)
        _check_neuron(config, degrees, shape)


def check_heads(engine: str, tensor_parallel: int, heads: int, kv_heads: int) -> None:
    """Refuse a degree that attention heads cannot be divided by.

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
            f"parallelism.tensor_parallel: {tensor_parallel} and the model's {kv_heads} key/value heads do not"
            " divide one another",
            "choose a divisor or a multiple",
        )


def check_family(family: str, degrees: Degrees) -> None:
    """Refuse a model that engine neuron has no modules for. `family` is config.json's model_type."""
    if family not in _NEURON_FAMILIES:
        raise UserError(
            f"model.source: engine neuron does not train models of type {family or '(none)'}",
            f"it trains {', '.join(_NEURON_FAMILIES)}",
        )
    if family == "granite" and degrees.pipeline_parallel > 1:
        raise UserError("parallelism.pipeline_parallel: optimum-neuron has no pipeline for granite", "set it to 1")


def _check_neuron(config: RunConfig, degrees: Degrees, shape: ModelShape) -> None:
    if shape.qkv_bias or shape.output_bias or shape.mlp_bias:
        raise UserError("model.source: its linears have biases, which optimum-neuron's have not", "use another model")
    if config.neuron.fuse_qkv and shape.heads != shape.kv_heads:
        raise UserError(
            f"neuron.fuse_qkv: the model has {shape.heads} query heads and {shape.kv_heads} key/value heads, and only"
            " equal numbers are fused",
            "set it to false",
        )
    targets = {target.rpartition(".")[2] for target in config.lora.target_modules}
    attention = {"q_proj", "k_proj", "v_proj"}
    fused = shape.kv_heads % degrees.tensor_parallel != 0
    if config.training.method == "lora" and fused and attention & targets and not attention <= targets:
        raise UserError(
            f"lora.target_modules: with {shape.kv_heads} key/value heads on {degrees.tensor_parallel} ranks, engine"
            " neuron has one module for q_proj, k_proj and v_proj",
            "name all three or none",
        )
