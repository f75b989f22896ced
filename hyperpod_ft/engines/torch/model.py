"""The model on this rank: loaded, with its adapters, split over tp and sharded over dp, in the configured precision."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from hyperpod_ft.engines import pretrained
from hyperpod_ft.engines.torch import tensor_parallel
from hyperpod_ft.engines.torch.lora import adapters
from hyperpod_ft.planning import parallelism
from hyperpod_ft.runs.run import Run

# Consecutive layers share their all-gathers and reduce-scatters up to this size on a rank.
BUCKET_BYTES = 32 * 2**20


@dataclass(frozen=True)
class ShardedModel:
    """A model whose parameters are DTensors, and what the training loop needs about them."""

    module: nn.Module
    trainable: dict[str, nn.Parameter]  # by FQN; fp32
    partial: list[nn.Parameter]  # parameters whose gradients must be summed over tp
    trainable_parameters: int  # of the whole model
    total_parameters: int

    def exchange_gradients(self, wanted: bool) -> None:
        """Whether the coming backward pass reduces gradients over dp: only the last micro batch of a step does."""
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(wanted)


def build(run: Run, mesh: DeviceMesh) -> ShardedModel:
    """Load the base model from `run.base_model` and shard it over `mesh` (axes dp, tp).

    Precision fp32 computes in fp32. bf16 computes in bf16: frozen weights are stored in bf16, trainable ones in
    fp32, cast by FSDP when it gathers them; gradients are reduced in fp32. Raises UserError when the model cannot
    be split, or a LoRA target matches no module.
    """
    config = run.config
    tensor_parallel_degree = mesh["tp"].size()
    model = _load(run)
    if tensor_parallel_degree > 1:
        # by attribute, not from config.json: older model families name these keys differently
        heads = model.config.num_attention_heads
        kv_heads = getattr(model.config, "num_key_value_heads", None) or heads
        parallelism.check_heads("torch", tensor_parallel_degree, heads, kv_heads)
    total_parameters = trainable_parameters = sum(p.numel() for p in model.parameters())
    if config.training.method == "lora":
        adapters.adapt(model, config.lora, config.seed)
        trainable_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        total_parameters += trainable_parameters
    layers = decoder_layers(model)
    if tensor_parallel_degree > 1:
        tensor_parallel.parallelize(layers, mesh["tp"])
    _shard(model, layers, run, mesh)
    return ShardedModel(
        module=model.train(),
        trainable={name: p for name, p in model.named_parameters() if p.requires_grad},
        partial=tensor_parallel.partial_gradient_parameters(layers) if tensor_parallel_degree > 1 else [],
        trainable_parameters=trainable_parameters,
        total_parameters=total_parameters,
    )


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks of a causal language model, by the class names that transformers lists for it."""
    classes = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in classes]


def _load(run: Run) -> PreTrainedModel:
    training = run.config.training
    frozen_in_bf16 = training.precision == "bf16" and training.method == "lora"
    dtype = torch.bfloat16 if frozen_in_bf16 else torch.float32
    model = pretrained.load(run.base_model, dtype, run.config.model.attention)
    if training.gradient_checkpointing:
        # the non-reentrant variant works with frozen inputs, and with collectives inside the block
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _buckets(layers: list[nn.Module]) -> list[list[nn.Module]]:
    """Consecutive layers gathered and reduced together: for small layers a collective costs nothing but latency."""
    buckets: list[list[nn.Module]] = []
    room = 0
    for layer in layers:
        size = sum(tensor_parallel.local(p).nbytes for p in layer.parameters())
        if size > room:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(layer)
        room -= size
    return buckets


def _shard(model: nn.Module, layers: list[nn.Module], run: Run, mesh: DeviceMesh) -> None:
    """FSDP2 over dp, layer by layer. With one dp rank it still keeps fp32 master weights for bf16."""
    training = run.config.training
    options: dict[str, Any] = {
        "mesh": mesh["dp"],
        # Gathered layers are kept until their backward pass, unless gradient checkpointing is on.
        "reshard_after_forward": training.gradient_checkpointing,
    }
    if training.precision == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for bucket in _buckets(layers):
        fully_shard(bucket, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # the loss is already divided by the tokens of all ranks: gradients are summed, not averaged
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
