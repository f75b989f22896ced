"""The model on this rank: its part of the base model and of the adapters, split over tp and divided over dp."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from hyperpod_ft.checkpoint.formats.model_directory import read_config
from hyperpod_ft.checkpoint.tensors.layout import LogicalTensor
from hyperpod_ft.engines.torch.loading import skeleton
from hyperpod_ft.engines.torch.loading.slices import SliceReader
from hyperpod_ft.engines.torch.loading.weights import locate
from hyperpod_ft.engines.torch.lora import adapters
from hyperpod_ft.engines.torch.mesh import Meshes, pipeline_ends
from hyperpod_ft.engines.torch.model import (
    activations,
    attention,
    compiling,
    gated_mlp,
    language_model,
    stages,
    tensor_parallel,
)
from hyperpod_ft.engines.torch.sharding.data_parallel import DataParallel, trained_parts
from hyperpod_ft.engines.torch.sharding.fully_sharded import ShardedWeights, shard_by_layer
from hyperpod_ft.engines.torch.sharding.replicated import ReplicatedWeights
from hyperpod_ft.planning import parallelism, pipeline
from hyperpod_ft.planning.model_shape import model_shape
from hyperpod_ft.planning.packing_rules import SEPARATING_FAMILIES
from hyperpod_ft.planning.sharding import Sharding
from hyperpod_ft.runs.run import Run


@dataclass(frozen=True)
class ShardedModel:
    """A model on this rank, and what the training loop needs about it."""

    module: nn.Module
    data_parallel: DataParallel
    stages: tuple[stages.Stage, ...]  # of a pipeline that are on this rank; one that has all layers without
    trainable_parameters: int  # of the whole model
    total_parameters: int


def build(run: Run, meshes: Meshes, sharding: Sharding) -> ShardedModel:
    """The base model of `run.base_model` with its adapters, divided over the ranks.

    It is built without memory, divided, and then each rank reads or draws its part. Precision fp32 computes in fp32.
    bf16 computes in bf16: frozen weights are stored in bf16, and trained ones have fp32 masters; gradients are summed
    in fp32. Raises UserError when the model cannot be loaded or split, its logits are not known, or a LoRA target
    matches no module.
    """
    config, mesh = run.config, meshes.weights
    dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
    # FSDP2 computes in bf16 with the fp32 weights that it updates; the other modes keep both
    trained = torch.float32 if config.training.method == "full" and sharding.by_layer else dtype
    model = _skeleton(run, trained)
    weights = locate(model, run.base_model)
    tensor_parallel_degree = mesh["tp"].size()
    if tensor_parallel_degree > 1:
        # by attribute, not from config.json: older model families name these keys differently
        heads = model.config.num_attention_heads
        kv_heads = getattr(model.config, "num_key_value_heads", None) or heads
        parallelism.check_heads("torch", tensor_parallel_degree, heads, kv_heads)
    language_model.return_loss(model)
    gated_mlp.keep_less(model)
    total_parameters = trainable_parameters = sum(p.numel() for p in model.parameters())
    if config.training.method == "lora":
        adapters.adapt(model, config.lora, config.seed)
        trainable_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        total_parameters += trainable_parameters
    own_stages, ends = _cut(run, model, mesh)
    layers = decoder_layers(model)
    partial: set[str] = set()
    if tensor_parallel_degree > 1:
        tensor_parallel.parallelize(layers, mesh["tp"])
        summed = {id(parameter) for parameter in tensor_parallel.partial_gradient_parameters(layers)}
        partial = {name for name, parameter in model.named_parameters() if id(parameter) in summed}
    _change_forward(layers, run, torch.device(mesh.device_type))
    parts = trained_parts(model, mesh)
    if ends and (name := stages.embedding_name(model)) in parts:
        parts[name] = replace(parts[name], ends=ends)
    if sharding.by_layer:
        following = iter(layers)
        by_stage = [list(itertools.islice(following, len(stage.layers))) for stage in own_stages]
        shard_by_layer(model, by_stage, mesh, sharding, dtype)
    offloaded = torch.device("cpu") if sharding.offload == "parameters" else None
    skeleton.materialize(model, torch.device(mesh.device_type), parameters_on=offloaded)
    skeleton.fill(model, weights)
    if config.training.method == "lora":
        _initialize_adapters(model, weights, config.seed)
    data_parallel: DataParallel
    if sharding.by_layer:
        several_stages = len(own_stages) > 1
        data_parallel = ShardedWeights(model, parts, partial, mesh, sharding, several_stages)
    else:
        data_parallel = ReplicatedWeights(model, parts, partial, mesh, offload=sharding.offload == "optimizer")
        rounded = {name for name, parameter in data_parallel.parameters.items() if parameter.dtype != torch.float32}
        masters = {name: master for name, master in data_parallel.state().items() if name in rounded}
        # from the files, which may hold more digits than the weights that compute
        skeleton.fill_tensors(masters, weights)
    return ShardedModel(model.train(), data_parallel, own_stages, trainable_parameters, total_parameters)


def _cut(
    run: Run, model: PreTrainedModel, mesh: DeviceMesh
) -> tuple[tuple[stages.Stage, ...], dist.ProcessGroup | None]:
    """Cut a model into the stages of a pipeline, in place; this rank's own, and the ranks that share an embedding."""
    degrees = run.plan.degrees
    if degrees.pipeline_parallel == 1:
        return (stages.Stage(0, 1, range(len(decoder_layers(model)))),), None
    model_config = read_config(run.base_model)
    pipeline.check_family(degrees, str(model_config.get("model_type", "")))
    shape = model_shape(model_config)
    assert shape is not None, "that of a family which can be cut is known"
    layers = pipeline.cut(run.config, degrees, shape)
    cut = [stages.Stage(index, len(layers), some) for index, some in enumerate(layers)]
    stages.check_trained(model, cut)
    ends = pipeline_ends(mesh) if stages.trains_tied_embedding(model) else None
    own = tuple(cut[number] for number in pipeline.stages_of(mesh.get_local_rank("pp"), run.config, degrees))
    stages.keep(model, own)
    return own, ends


def _change_forward(layers: list[nn.Module], run: Run, device: torch.device) -> None:
    """What is recomputed is compiled too, and host memory takes what is left."""
    training = run.config.training
    activations.checkpoint_layers(layers, training)
    compiling.compile_layers(layers, training, device, run.root)
    if training.activation_offload:
        activations.offload_layers(layers, device)


@torch.no_grad()
def _initialize_adapters(model: PreTrainedModel, weights: Mapping[str, LogicalTensor], seed: int) -> None:
    """Give the adapters their initial values, and those linears that keep their weight in 4 bits this weight."""
    with SliceReader() as reader:
        for name, module in model.named_modules():
            if isinstance(module, adapters.LoraLinear) and module.codes is not None:
                weight = torch.empty(module.out_features, module.in_features, device=module.codes.device)
                reader.copy(weights[f"{name}.weight"], (0, 0), weight)
                module.quantize(weight)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            value = adapters.initial_value(name, parameter.shape, seed)
            if value is None:
                value = adapters.initial_magnitude(model.get_submodule(name.rpartition(".")[0]))
            start, part = skeleton.local_part(parameter)
            part.copy_(value[tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=True))])


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks of a causal language model, by the class names that transformers lists for it."""
    classes = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in classes]


def _skeleton(run: Run, dtype: torch.dtype) -> PreTrainedModel:
    # other families keep their own attention, one document a row
    separates = read_config(run.base_model).get("model_type") in SEPARATING_FAMILIES
    return skeleton.build(run.base_model, dtype, attention.NAME if separates else None)
