"""The model on this rank: loaded, with its adapters, split over tp and sharded over dp, in the configured precision."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from hyperpod_ft.checkpoint.formats.model_directory import read_config
from hyperpod_ft.engines import pretrained
from hyperpod_ft.engines.torch import activations, attention, compiling, language_model, tensor_parallel
from hyperpod_ft.engines.torch.fully_sharded import ShardedWeights, shard_by_layer
from hyperpod_ft.engines.torch.lora import adapters
from hyperpod_ft.engines.torch.replicated import ReplicatedWeights
from hyperpod_ft.engines.torch.sharding import DataParallel, trained_parts
from hyperpod_ft.planning import parallelism
from hyperpod_ft.planning.packing_rules import SEPARATING_FAMILIES
from hyperpod_ft.planning.sharding import Sharding
from hyperpod_ft.runs.run import Run


@dataclass(frozen=True)
class ShardedModel:
    """A model on this rank, and what the training loop needs about it."""

    module: nn.Module
    data_parallel: DataParallel
    trainable_parameters: int  # of the whole model
    total_parameters: int


def build(run: Run, mesh: DeviceMesh, sharding: Sharding) -> ShardedModel:
    """Load the base model from `run.base_model`, and divide it over `mesh` (axes dp_replicate, dp_shard, tp).

    Precision fp32 computes in fp32. bf16 computes in bf16: frozen weights are stored in bf16, and trained ones have
    fp32 masters; gradients are summed in fp32. Raises UserError when the model cannot be split, its logits are not
    known, or a LoRA target matches no module.
    """
    config = run.config
    tensor_parallel_degree = mesh["tp"].size()
    model = _load(run)
    if tensor_parallel_degree > 1:
        # by attribute, not from config.json: older model families name these keys differently
        heads = model.config.num_attention_heads
        kv_heads = getattr(model.config, "num_key_value_heads", None) or heads
        parallelism.check_heads("torch", tensor_parallel_degree, heads, kv_heads)
    language_model.return_loss(model)
    total_parameters = trainable_parameters = sum(p.numel() for p in model.parameters())
    if config.training.method == "lora":
        adapters.adapt(model, config.lora, config.seed)
        trainable_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        total_parameters += trainable_parameters
    layers = decoder_layers(model)
    if tensor_parallel_degree > 1:
        tensor_parallel.parallelize(layers, mesh["tp"])
    _change_forward(layers, run, mesh)
    partial = tensor_parallel.partial_gradient_parameters(layers) if tensor_parallel_degree > 1 else []
    return ShardedModel(
        module=model.train(),
        data_parallel=_data_parallel(model, layers, partial, run, mesh, sharding),
        trainable_parameters=trainable_parameters,
        total_parameters=total_parameters,
    )


def _change_forward(layers: list[nn.Module], run: Run, mesh: DeviceMesh) -> None:
    """What is recomputed is compiled too, and host memory takes what is left."""
    training, device = run.config.training, torch.device(mesh.device_type)
    activations.checkpoint_layers(layers, training)
    compiling.compile_layers(layers, training, device, run.root)
    if training.activation_offload:
        activations.offload_layers(layers, device)


def _data_parallel(
    model: nn.Module,
    layers: list[nn.Module],
    partial: list[nn.Parameter],
    run: Run,
    mesh: DeviceMesh,
    sharding: Sharding,
) -> DataParallel:
    training = run.config.training
    dtype = torch.bfloat16 if training.precision == "bf16" else torch.float32
    parts = trained_parts(model, mesh)
    incomplete = {id(parameter) for parameter in partial}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in incomplete}
    if sharding.by_layer:
        shard_by_layer(model, layers, mesh, sharding, dtype)
        return ShardedWeights(model, parts, names, mesh, sharding)
    model.to(mesh.device_type)
    # adapters stay fp32, which their modules cast
    trained = dtype if training.method == "full" else torch.float32
    return ReplicatedWeights(model, parts, names, mesh, trained, offload=sharding.offload == "optimizer")


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks of a causal language model, by the class names that transformers lists for it."""
    classes = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in classes]


def _load(run: Run) -> PreTrainedModel:
    training = run.config.training
    frozen_in_bf16 = training.precision == "bf16" and training.method == "lora"
    dtype = torch.bfloat16 if frozen_in_bf16 else torch.float32
    # other families keep their own attention, one document a row
    separates = read_config(run.base_model).get("model_type") in SEPARATING_FAMILIES
    return pretrained.load(run.base_model, dtype, attention.NAME if separates else None)
