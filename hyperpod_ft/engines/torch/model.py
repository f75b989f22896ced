"""The model on this rank: loaded, with its adapters, split over tp and sharded over dp, in the configured precision."""

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from hyperpod_ft.engines.lora_targets import no_such_module
from hyperpod_ft.engines.torch import loading, tensor_parallel
from hyperpod_ft.engines.torch.weights import locate
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
    """The base model of `run.base_model` with its adapters, sharded over `mesh` (axes dp, tp): on each rank, its part.

    Precision fp32 computes in fp32. bf16 computes in bf16: frozen weights are stored in bf16, trainable ones in
    fp32, cast by FSDP when it gathers them; gradients are reduced in fp32. Raises UserError when the model cannot
    be loaded or split, or a LoRA target matches no module.
    """
    config = run.config
    tensor_parallel_degree = mesh["tp"].size()
    base = _skeleton(run)
    weights = locate(base, run.base_model)
    if tensor_parallel_degree > 1:
        # by attribute, not from config.json: older model families name these keys differently
        heads = base.config.num_attention_heads
        kv_heads = getattr(base.config, "num_key_value_heads", None) or heads
        parallelism.check_heads("torch", tensor_parallel_degree, heads, kv_heads)
    model = _with_adapters(base, run) if config.training.method == "lora" else base
    layers = decoder_layers(base)
    trainable_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total_parameters = sum(p.numel() for p in model.parameters())
    if tensor_parallel_degree > 1:
        tensor_parallel.parallelize(layers, mesh["tp"])
    _shard(model, layers, run, mesh)
    loading.materialize(model, torch.device(mesh.device_type))
    loading.fill(model, weights, _stored_name)
    _draw_adapters(model, config.seed)
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


def _skeleton(run: Run) -> PreTrainedModel:
    training = run.config.training
    frozen_in_bf16 = training.precision == "bf16" and training.method == "lora"
    dtype = torch.bfloat16 if frozen_in_bf16 else torch.float32
    model = loading.build_skeleton(run.base_model, dtype, run.config.model.attention)
    if training.gradient_checkpointing:
        # the non-reentrant variant works with frozen inputs, and with collectives inside the block
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _with_adapters(base: PreTrainedModel, run: Run) -> nn.Module:
    lora = run.config.lora
    names = {name for name, module in base.named_modules() if isinstance(module, nn.Linear | nn.Embedding)}
    for target in lora.target_modules:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise no_such_module(target, names)
    adapters = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules),
        use_rslora=lora.rslora,
        bias="none",
        task_type="CAUSAL_LM",
    )
    # on the meta device, like the base
    return get_peft_model(base, adapters, low_cpu_mem_usage=True)


def _stored_name(name: str) -> str | None:
    """The base model's own name of a parameter; None for an adapter's."""
    if ".lora_" in name:
        return None
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def drawn_factor(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """A LoRA factor before training, fp32, as PEFT draws it: A uniform (Kaiming), B 0; for embeddings A 0, B normal.

    Drawn whole from the seed and its name: ranks agree, and so do layouts.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    factor = torch.zeros(shape)
    if ".lora_A." in name:
        nn.init.kaiming_uniform_(factor, a=math.sqrt(5), generator=generator)
    elif ".lora_embedding_B." in name:
        factor.normal_(generator=generator)
    return factor


@torch.no_grad()
def _draw_adapters(model: nn.Module, seed: int) -> None:
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            start, part = loading.local_part(parameter)
            own = tuple(slice(begin, begin + size) for begin, size in zip(start, part.shape, strict=True))
            part.copy_(drawn_factor(name, parameter.shape, seed)[own])


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
