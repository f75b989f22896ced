"""Tensor parallelism over a Hugging Face model's own modules.

Megatron's scheme (Shoeybi et al., arXiv:1909.08053): q, k, v, gate and up are split by output rows
("column-parallel", as y = x W^T), o and down by input columns ("row-parallel"), so each attention head and each inner
unit of the MLP is entirely on one rank. Each attention or MLP block then needs one all-reduce in the forward pass
(of its output) and one in the backward pass (of its input's gradient).

LoRA factors follow: on a column-parallel linear, lora_A is replicated on every rank and lora_B is split like the
output; on a row-parallel one, lora_A is split like the input and lora_B is replicated. The adapter's output joins the
block's one all-reduce, since lora_B is linear: sum_i B(A_i x_i) = B(sum_i A_i x_i). DoRA's norms of the rows of a
row-parallel linear need an all-reduce of one number per row.

Split parameters are DTensors on the `tp` axis, so FSDP2, the checkpoint and the gradient norm know their global
shape; the modules compute with their local shard. Replicated parameters that see only their rank's heads or units
(replicated LoRA factors, norms over head_dim) get partial gradients, which DataParallel sums over tp once a step.

Embedding, output matrix and layer norms are replicated on every tp rank: each holds them in full (sharded over dp
only) and computes the full logits.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from hyperpod_ft.engines.torch.sharding.parts import local
from hyperpod_ft.errors import UserError

COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW = ("o_proj", "down_proj")
_BLOCKS = ("self_attn", "mlp")


def parallelize(layers: list[nn.Module], mesh: DeviceMesh) -> None:
    """Split the linears of decoder layers over the 1-D `mesh`, in place; no communication.

    The layers are whole on every rank, with equal values, or on the meta device, without values. Raises UserError for
    a layer whose modules are not those of the Llama family (Llama, Mistral, Qwen2, Qwen3), or whose widths are not
    divisible.
    """
    for layer in layers:
        _refuse_unknown(layer)
        for block in _BLOCKS:
            layer.get_submodule(block).register_forward_pre_hook(_enter_block(mesh), with_kwargs=True)
        for name, linear in _projections(layer):
            row = name in ROW
            _split(name, linear, mesh, dim=1 if row else 0)
            if _is_adapted(linear):
                _split(name, linear.lora_A if row else linear.lora_B, mesh, dim=1 if row else 0)
                if row:
                    linear.divide_rows(mesh.get_group())
            else:
                linear.forward = _LocalLinear(linear, with_bias=not row)
            if row:
                linear.register_forward_hook(_leave_block(mesh))


def partial_gradient_parameters(layers: list[nn.Module]) -> list[nn.Parameter]:
    """Trainable parameters that are replicated over tp but whose gradient covers only the rank's heads or units."""
    found: list[nn.Parameter] = []
    for layer in layers:
        for name, linear in _projections(layer):
            if _is_adapted(linear):
                found.append((linear.lora_B if name in ROW else linear.lora_A).weight)
                if name in ROW and linear.lora_magnitude_vector is not None:
                    found.append(linear.lora_magnitude_vector)
        found.extend(parameter for norm in _head_norms(layer) for parameter in norm.parameters())
    return [parameter for parameter in found if parameter.requires_grad]


class _CopyToBlock(torch.autograd.Function):
    """Identity forward; backward sums the gradient over the group (Megatron's `f`)."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _SumOverRanks(torch.autograd.Function):
    """Sum over the group forward; backward passes the gradient unchanged (Megatron's `g`)."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = partial.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


def _enter_block(mesh: DeviceMesh) -> Any:
    group = mesh.get_group()

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # transformers passes hidden_states by name to attention, by position to the MLP
        if args:
            return (_CopyToBlock.apply(args[0], group), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": _CopyToBlock.apply(kwargs["hidden_states"], group)}

    return hook


def _leave_block(mesh: DeviceMesh) -> Any:
    group = mesh.get_group()

    def hook(linear: nn.Linear, _: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        total = _SumOverRanks.apply(output, group)
        return total if linear.bias is None else total + local(linear.bias).to(total.dtype)

    return hook


def _split(name: str, linear: nn.Linear, mesh: DeviceMesh, dim: int) -> None:
    width = linear.weight.shape[dim]
    if width % mesh.size():
        raise UserError(
            f"parallelism.tensor_parallel: {mesh.size()} does not divide the {width} units of {name}",
            "set it to a divisor of that number",
        )
    for key, parameter in list(linear.named_parameters(recurse=False)):
        if parameter.ndim <= dim:
            # on a row-parallel linear the bias is added once, after the sum, and DoRA's magnitude is of whole rows
            continue
        split = distribute_tensor(parameter.data, mesh, [Shard(dim)], src_data_rank=None)
        setattr(linear, key, nn.Parameter(split, requires_grad=parameter.requires_grad))


class _LocalLinear:
    """The forward pass of a split nn.Linear on plain tensors: x [..., in] -> x W_local^T [..., out]."""

    def __init__(self, linear: nn.Linear, with_bias: bool) -> None:
        self._linear = linear
        self._with_bias = with_bias

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        linear = self._linear
        bias = local(linear.bias) if self._with_bias and linear.bias is not None else None
        return nn.functional.linear(hidden, local(linear.weight), bias)


def _projections(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    for block in _BLOCKS:
        for name, module in layer.get_submodule(block).named_children():
            if name in COLUMN + ROW:
                yield name, module


def _is_adapted(linear: nn.Module) -> bool:
    """Whether it is a LoraLinear (lora/adapters.py), which computes with its local shards itself."""
    return hasattr(linear, "lora_A")


def _head_norms(layer: nn.Module) -> list[nn.Module]:
    attention = layer.get_submodule("self_attn")
    return [module for name, module in attention.named_children() if name in ("q_norm", "k_norm")]


def _refuse_unknown(layer: nn.Module) -> None:
    """Every parameter must belong to a projection that can be split, a norm over one head, or a layer norm."""
    blocks = [name for name in _BLOCKS if hasattr(layer, name)]
    unknown = {name for name, p in layer.named_parameters() if p.ndim > 1 or name.startswith(_BLOCKS)}
    projections: set[str] = set()
    if len(blocks) == len(_BLOCKS):
        projections = {name for name, _ in _projections(layer)}
        known = [p for _, linear in _projections(layer) for p in linear.parameters()]
        # OLMo 2 norms all heads together, which needs their sum of squares over all ranks
        head_dim = getattr(layer.self_attn, "head_dim", None)
        known += [p for norm in _head_norms(layer) for p in norm.parameters() if p.numel() == head_dim]
        ids = {id(p) for p in known}
        unknown = {name for name in unknown if id(layer.get_parameter(name)) not in ids}
    if unknown or projections != {*COLUMN, *ROW}:
        seen = ", ".join(sorted({name.removesuffix(".weight").removesuffix(".bias") for name in unknown}))
        raise UserError(
            f"parallelism.tensor_parallel: engine torch cannot split {type(layer).__name__} ({seen or 'no MLP'})",
            "set it to 1; models built like Llama, Mistral, Qwen2 and Qwen3 can be split",
        )
