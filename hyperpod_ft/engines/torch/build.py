"""The model on this rank: its part of the base model and of the adapters, split over tp and divided over dp."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from hyperpod_ft.checkpoint.formats.located import locate, names_in_checkpoints, untie_head
from hyperpod_ft.checkpoint.sharded.description import LoraDescription
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.config.sections.training import Lora, Training
from hyperpod_ft.engines import checkpoint_directory
from hyperpod_ft.engines.interface import TrainingTask
from hyperpod_ft.engines.torch import devices
from hyperpod_ft.engines.torch.loading import skeleton
from hyperpod_ft.engines.torch.loading.held import check_experts, held_parts
from hyperpod_ft.engines.torch.loading.slices import SliceReader
from hyperpod_ft.engines.torch.lora import adapters
from hyperpod_ft.engines.torch.lora.continued import starting_factors
from hyperpod_ft.engines.torch.mesh import Meshes
from hyperpod_ft.engines.torch.model import (
    activations,
    attention,
    context_parallel,
    expert_parallel,
    gated_mlp,
    language_model,
    rms_norm,
    stages,
    tensor_parallel,
)
from hyperpod_ft.engines.torch.model.expert_load import ExpertCounts
from hyperpod_ft.engines.torch.model.router_loss import RouterLoss
from hyperpod_ft.engines.torch.model.t5 import model as t5
from hyperpod_ft.engines.torch.sharding.fully_sharded import ShardedWeights, shard_by_layer
from hyperpod_ft.engines.torch.sharding.replicated import ReplicatedWeights
from hyperpod_ft.engines.torch.sharding.shards import RankShard, TensorSplit, local, shards_of
from hyperpod_ft.engines.torch.sharding.trained_weights import TrainedWeights
from hyperpod_ft.planning import parallelism
from hyperpod_ft.planning.layout import Layout
from hyperpod_ft.planning.torch.limits import divisible_family


@dataclass(frozen=True)
class ShardedModel:
    """A model on this rank, and what the training loop needs about it."""

    module: PreTrainedModel
    trained_weights: TrainedWeights
    pipeline_stages: tuple[stages.StageLayers, ...]  # those on this rank; without a pipeline, one with all layers
    trainable_parameters: int  # of the whole model
    total_parameters: int
    expert_counts: ExpertCounts
    router_loss: RouterLoss | None = None  # of a mixture whose config.json asks for it


def build(task: TrainingTask, meshes: Meshes) -> ShardedModel:
    """The base model with its adapters, divided over the ranks as the layout says.

    It is built without memory, divided, and then each rank reads or draws its shards. Precision fp32 computes in fp32.
    bf16 computes in bf16: frozen weights are stored in bf16, and trained ones have fp32 masters; gradients are summed
    in fp32. Raises UserError when the model cannot be loaded or split, its logits are not known, a LoRA target
    matches no module, or what is trained could not be consolidated.
    """
    config, sharding, mesh = task.config, task.layout.sharding, meshes.weights
    device = torch.device(mesh.device_type)
    dtype = devices.DTYPES[config.training.precision]
    # FSDP2 computes in bf16 with the fp32 weights that it updates; the other modes keep both
    trained = torch.float32 if config.training.method == "full" and sharding.by_layer else dtype
    model = whole_model(task.base_model, trained, own_attention=task.layout.own_attention)
    weights = locate(model, task.base_model)
    router_loss = _prepare(model, config.training, meshes)
    expert_counts = ExpertCounts(model, device, whole_rows=meshes.tokens["cp"].size() == 1)
    total_parameters = trainable_parameters = sum(p.numel() for p in model.parameters())
    described, factors = None, dict[str, LogicalTensor]()
    if config.training.method == "lora":
        described = adapted(model, config.lora, config.seed, task.base_model)
        trainable_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        total_parameters += sum(p.numel() for name, p in model.named_parameters() if adapters.is_factor(name))
        if sharding.by_layer:
            _keep_masters(model)
    stored_names = names_in_checkpoints(model, weights, task.base_model)
    if task.adapter:
        factors = starting_factors(task.adapter, model, stored_names)
    parts = held_parts(model, weights, task.base_model) if described is None else {}
    if described:
        check_experts(weights, task.base_model, described.target_parameters)
    checkpoint_directory.check_consolidable(trained_shapes(model, stored_names), described, task.base_model, parts)
    cut = _stages(task.layout, model)
    splits = _divide(model, task.layout, mesh["tp"], cut) if mesh["tp"].size() > 1 else {}
    of_experts = expert_parallel.divide(model, meshes.experts) if meshes.experts else {}
    own_stages = cut[mesh.get_local_rank("pp") :: mesh["pp"].size()]
    ends = stages.keep(model, own_stages, mesh) if len(cut) > 1 else {}
    _change_forward(decoder_layers(model), task, device)
    parameters = dict(model.named_parameters())
    shards = shards_of(parameters, mesh, splits)
    shards |= {name: replace(shards[name], ends=group) for name, group in ends.items()}
    if meshes.experts:
        shards |= shards_of({name: parameters[name] for name in of_experts}, meshes.experts, of_experts)
    if sharding.by_layer:
        others = {parameters[name]: shards[name].mesh for name in of_experts}
        shard_by_layer(model, _layers_of(model, own_stages), mesh, sharding, dtype, others)
    offloaded = torch.device("cpu") if sharding.offload == "parameters" else None
    skeleton.materialize(model, device, parameters_on=offloaded)
    held = shards if sharding.by_layer else {name: shard.unsharded for name, shard in shards.items()}
    skeleton.fill(model, weights, held)
    if config.training.method == "lora":
        _initialize_adapters(model, weights, factors, held, config.seed)
    trained_weights: TrainedWeights
    if sharding.by_layer:
        trained_weights = ShardedWeights(model, shards, mesh, sharding, several_stages=len(own_stages) > 1)
    else:
        trained_weights = _replicated(
            model, {**weights, **factors}, shards, mesh, offload=sharding.offload == "optimizer"
        )
    trained_weights.stored_names, trained_weights.held, trained_weights.adapters = stored_names, parts, described
    return ShardedModel(
        model.train(),
        trained_weights,
        own_stages,
        trainable_parameters,
        total_parameters,
        expert_counts,
        router_loss,
    )


def adapted(model: PreTrainedModel, lora: Lora, seed: int, directory: Path) -> LoraDescription:
    """Give the model in `directory` its adapters, in place. Raises UserError as `adapters.adapt` does."""
    return checkpoint_directory.describe_lora(lora, directory, *adapters.adapt(model, lora, seed))


def trained_shapes(model: PreTrainedModel, stored_names: Mapping[str, str]) -> dict[str, torch.Size]:
    """The shapes of the trained parameters of a whole model, by their names in checkpoints."""
    trained = (each for each in model.named_parameters() if each[1].requires_grad)
    return {stored_names.get(name, name): parameter.shape for name, parameter in trained}


def _prepare(model: PreTrainedModel, training: Training, meshes: Meshes) -> RouterLoss | None:
    """Before it is divided: check its heads, and change its attention, its result and what its layers keep.

    Returns what measures the load-balancing loss of its routers, if it has one.
    """
    tensor_parallel_degree = meshes.weights["tp"].size()
    if tensor_parallel_degree > 1:
        # by attribute, not from config.json: older model families name these keys differently
        heads = model.config.num_attention_heads
        kv_heads = getattr(model.config, "num_key_value_heads", None) or heads
        parallelism.check_heads("torch", tensor_parallel_degree, heads, kv_heads)
    context_parallel.divide_attention(meshes.tokens["cp"])
    device = torch.device(meshes.weights.device_type)
    compiled = devices.compiles(training, device)
    fused = compiled and device.type == "cuda"
    router_loss = None
    if model.config.is_encoder_decoder:
        t5.return_loss(model, fused=fused)
    else:
        router_loss = language_model.return_loss(model, fused=fused)
    if not compiled:
        # a compiler finds out by itself what need not be kept, and modules with their own forward functions would give
        # each layer a separate graph
        gated_mlp.keep_less(model)
        rms_norm.keep_less(model)
    return router_loss


def _keep_masters(model: PreTrainedModel) -> None:
    """Make what is trained whole beside adapters fp32, in which FSDP2 updates it; before it has values."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _replicated(
    model: PreTrainedModel,
    weights: Mapping[str, LogicalTensor],
    shards: Mapping[str, RankShard],
    mesh: DeviceMesh,
    *,
    offload: bool,
) -> ReplicatedWeights:
    """Weights whole on each data-parallel rank, with masters of those that compute in fewer digits."""
    trained = ReplicatedWeights(model, shards, mesh, offload=offload)
    rounded = {name for name, parameter in trained.parameters.items() if parameter.dtype != torch.float32}
    masters = {name: shards[name].boxes(trained.master(name)) for name in rounded}
    # from the files, which may hold more digits than the weights that compute
    skeleton.fill_boxes(masters, weights)
    return trained


def _stages(layout: Layout, model: PreTrainedModel) -> tuple[stages.StageLayers, ...]:
    """All stages of the pipeline, in order; without a pipeline, one stage with all layers."""
    if not layout.stages:
        return (stages.StageLayers(0, 1, range(len(decoder_layers(model)))),)
    cut = tuple(stages.StageLayers(i, len(layout.stages), range(*ends)) for i, ends in enumerate(layout.stages))
    stages.check_trained(model, cut)
    return cut


def _layers_of(model: PreTrainedModel, some: Sequence[stages.StageLayers]) -> list[list[nn.Module]]:
    """The layers of each of the stages that `model` has."""
    following = iter(decoder_layers(model))
    return [list(itertools.islice(following, len(stage.layers))) for stage in some]


def _divide(
    model: PreTrainedModel, layout: Layout, mesh: DeviceMesh, cut: Sequence[stages.StageLayers]
) -> dict[str, TensorSplit]:
    """Split the model over tensor-parallel ranks, before it is cut into stages."""
    if model.config.is_encoder_decoder:
        splits = t5.parallelize(model, mesh)
    else:
        family = divisible_family(model.config.model_type)
        splits = tensor_parallel.parallelize(
            model, family, mesh, sequence_parallel=layout.sequence_parallel, stages=_layers_of(model, cut)
        )
    if devices.same_bits(torch.device(mesh.device_type)):
        return splits
    # of what each rank computes whole, such as the gradient of the last norm, they take the mean: copies stay the same
    mean = TensorSplit(torch.Size(), sums=mesh.get_group(), share=1 / mesh.size())
    return {name: replace(mean, shape=p.shape) for name, p in model.named_parameters()} | splits


def _change_forward(layers: list[nn.Module], task: TrainingTask, device: torch.device) -> None:
    """Change the layers' forward: they are recomputed and compiled, and what they still keep goes to host memory."""
    training, divides_experts = task.config.training, task.layout.degrees.expert_parallel > 1
    if not divides_experts:
        activations.checkpoint_layers(layers, training)
    devices.compile_layers(layers, training, device, task.compile_cache)
    # graphs end where experts exchange tokens: within what is recomputed, nothing would be compiled
    if divides_experts:
        activations.checkpoint_layers(layers, training)
    if training.activation_offload:
        activations.offload_layers(layers, device)


@torch.no_grad()
def _initialize_adapters(
    model: PreTrainedModel,
    weights: Mapping[str, LogicalTensor],
    factors: Mapping[str, LogicalTensor],
    shards: Mapping[str, RankShard],
    seed: int,
) -> None:
    """Give the adapters their initial values, and those linears that keep their weight in 4 bits this weight.

    `factors`: of an adapter that training continues; none for a new one.
    """
    with SliceReader() as reader:
        for name, module in model.named_modules():
            if isinstance(module, adapters.LoraLinear) and module.codes is not None:
                stored = weights[f"{name}.weight"]
                weight = torch.empty(stored.shape, device=module.codes.device)
                reader.copy(stored, (0, 0), weight)
                module.quantize(weight)
    skeleton.fill(model, factors, shards)
    for name, parameter in model.named_parameters():
        if adapters.is_factor(name) and name not in factors:
            value = adapters.initial_value(name, shards[name].shape, seed)
            own = local(parameter)
            if value is None:
                magnitude = adapters.initial_magnitude(model.get_submodule(name.rpartition(".")[0]))
                own.copy_(shards[name].take(magnitude))
                continue
            for start, box in shards[name].boxes(own):
                box.copy_(value[tuple(slice(a, a + n) for a, n in zip(start, box.shape, strict=True))])


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks of a language model, by the class names that transformers lists; an encoder's come first."""
    classes = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in classes]


def whole_model(directory: Path, dtype: torch.dtype, *, own_attention: bool = False) -> PreTrainedModel:
    """The base model without memory, undivided. Raises UserError when it cannot be built.

    `own_attention`: with the engine's attention, which separates the documents of a row, instead of transformers' own.
    """
    model = skeleton.build(directory, dtype, attention.NAME if own_attention else None)
    untie_head(model, directory)
    return model
