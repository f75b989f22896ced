"""Tensor parallelism over a Hugging Face model's own modules, by the table of families.

Megatron's scheme (Shoeybi et al., arXiv:1909.08053): the linears that a block, attention or MLP, begins with are split
by outputs ("column-parallel", as y = x W^T), the last one by inputs ("row-parallel"), so each attention head and each
inner unit of the MLP is entirely on one rank. A block then needs one sum over the ranks in the forward pass (of its
output) and one in the backward pass (of its input's gradient). A fused linear is split part by part.

Where there are more ranks than key/value heads, neighbors have copies of the same head: each computes the attention of
other queries, so the gradients of the copies add up.

With sequence parallelism (arXiv:2205.05198, section 4.2.2) what lies between blocks, norms and residuals, is divided
over the ranks by position. Blocks gather the sequence and sum into parts of it, which moves as many bytes as the sums.

LoRA factors follow: on a column-parallel linear, lora_A is replicated on every rank and lora_B is split like the
output; on a row-parallel one, lora_A is split like the input and lora_B is replicated. The adapter's output joins the
block's one sum, since lora_B is linear: sum_i B(A_i x_i) = B(sum_i A_i x_i). DoRA's norms of the rows of a row-parallel
linear need an all-reduce of one number per row.

The modules hold and compute with plain tensors, this rank's parts. Replicated parameters that see only their rank's
heads, units or positions get partial gradients, which TrainedWeights sums over the ranks once a step.
"""

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hyperpod_ft.engines.torch.lora import adapters
from hyperpod_ft.engines.torch.mesh import groups_of_neighbors
from hyperpod_ft.engines.torch.model import vocabulary_parallel
from hyperpod_ft.engines.torch.sharding.shards import TensorSplit
from hyperpod_ft.engines.torch.tensor_collectives import (
    Exchange,
    copy_to_ranks,
    divide_dropout,
    divide_sequence,
    gather_sequence,
    join_sequence,
    sum_both_ways,
    sum_over_ranks,
    sum_sequence,
)
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.families import Family, Outputs
from hyperpod_ft.planning.layout import copies_over_tensor


def parallelize(
    model: PreTrainedModel,
    family: Family,
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool,
    stages: Sequence[Sequence[nn.Module]] | None = None,
) -> dict[str, TensorSplit]:
    """Split a model over the 1-D `mesh`, in place; returns what became of parameters, by FQN.

    `stages`: its layers, in the groups that a forward pass computes, if it will be part of a pipeline. The model is
    whole on every rank, with equal values, or on the meta device, without values; its degrees have passed
    planning.parallelism.check_heads. Collective over all ranks, since it makes process groups.
    """
    splitting = Splitting(model.config, family, mesh)
    for layers in stages or [list(model.get_submodule(family.layers).children())]:
        for layer in layers:
            splitting.layer(layer, sequence_parallel)
        if sequence_parallel and layers:
            layers[0].register_forward_pre_hook(enter_block(divide_sequence, splitting.group), with_kwargs=True)
            layers[-1].register_forward_hook(_on_output(join_sequence, splitting.group))
    splits = splitting.splits | vocabulary_parallel.divide(
        [model.get_submodule(family.embedding)],
        model.get_submodule(family.head),
        model.config.vocab_size,
        splitting.group,
    )
    return {
        name: splits[parameter]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter in splits
    }


class Splitting:
    """Splits layer after layer; `splits` by parameter."""

    def __init__(self, config: Any, family: Family, mesh: DeviceMesh) -> None:
        self.family, self.group = family, mesh.get_group()
        self.splits: dict[nn.Parameter, TensorSplit] = {}
        self._heads = int(config.num_attention_heads)
        self._kv_heads = int(getattr(config, "num_key_value_heads", None) or self._heads)
        # of widths, where a linear has several parts
        self._proportions = {"queries": self._heads, "keys": self._kv_heads, "triples": 3 * self._heads, "units": 1}
        self._copies_of_keys = copies_over_tensor(self._kv_heads, self.group.size())
        self._key_group = groups_of_neighbors(mesh, self._copies_of_keys) if self._copies_of_keys > 1 else None

    def layer(self, layer: nn.Module, sequence_parallel: bool) -> None:
        family, group = self.family, self.group
        enter, leave = (gather_sequence, sum_sequence) if sequence_parallel else (copy_to_ranks, sum_over_ranks)
        if family.shared_input:
            layer.get_submodule(family.shared_input).register_forward_hook(_on_output(enter, group))
        for name in () if family.shared_input else (family.attention, family.mlp):
            layer.get_submodule(name).register_forward_pre_hook(enter_block(enter, group), with_kwargs=True)
        self.linears(layer, leave)
        self._attention(layer.get_submodule(family.attention))
        # the others, norms and dropout between blocks and biases of rows, see a part of the positions
        if not sequence_parallel:
            return
        for parameter in layer.parameters():
            if parameter not in self.splits:
                self._sum(parameter)
        for module in layer.modules():
            if isinstance(module, nn.Dropout):
                divide_dropout(module, group)

    def linears(self, block: nn.Module, leave: Exchange) -> None:
        """Split the family's linears; `leave` takes the outputs of the last ones to all ranks."""
        for path, outputs in self.family.columns.items():
            self.column(block.get_submodule(path), outputs)
        for path in self.family.rows:
            linear = block.get_submodule(path)
            self.row(linear)
            linear.register_forward_hook(_leave_block(leave, self.group))

    def column(self, linear: Any, outputs: tuple[Outputs, ...]) -> None:
        if adapters.is_adapted(linear):
            self._sum(linear.lora_A.weight)
            self.divide(linear.lora_B, outputs, {"weight": 0})
        self.divide(linear, outputs, {"weight": int(self.family.transposed), "bias": 0, "lora_magnitude_vector": 0})
        if isinstance(linear, Conv1D):
            linear.nf = linear.weight.shape[1]

    def row(self, linear: Any) -> None:
        dim = int(not self.family.transposed)
        self.divide(linear, ("units",), {"weight": dim})
        if adapters.is_adapted(linear):
            self.divide(linear.lora_A, ("units",), {"weight": 1})
            self._sum(linear.lora_B.weight)
            if linear.lora_magnitude_vector is not None:
                self._sum(linear.lora_magnitude_vector)
            linear.divide_rows(self.group)
        else:
            linear.__class__ = _row_class(linear.__class__)

    def _attention(self, attention: Any) -> None:
        tensor_parallel = self.group.size()
        for paths, divisor in (
            (self.family.query_attributes, tensor_parallel),
            (self.family.key_attributes, min(tensor_parallel, self._kv_heads)),
        ):
            for path in paths:
                owner, _, name = path.rpartition(".")
                if owner:  # shared with other modules
                    setattr(attention, owner, copy.copy(getattr(attention, owner)))
                holder = getattr(attention, owner) if owner else attention
                setattr(holder, name, getattr(holder, name) // divisor)
        if self.family.head_norms == "each":
            self._sum(attention.q_norm.weight)
            self._sum(attention.k_norm.weight)
        elif self.family.head_norms == "all":
            self._norm_of_all_heads(attention.q_norm, "queries", copies=1)
            self._norm_of_all_heads(attention.k_norm, "keys", copies=self._copies_of_keys)

    def _norm_of_all_heads(self, norm: Any, outputs: Outputs, copies: int) -> None:
        vars(norm).pop("forward", None)  # that of rms_norm.py
        norm.__class__ = _norm_class(norm.__class__)
        norm.repeated_width, norm.group = norm.weight.numel() * copies, self.group
        self.divide(norm, (outputs,), {"weight": 0})

    def _sum(self, parameter: nn.Parameter) -> None:
        self.splits[parameter] = TensorSplit(parameter.shape, sums=self.group)

    def divide(self, module: nn.Module, outputs: tuple[Outputs, ...], dims: Mapping[str, int]) -> None:
        """Replace these parameters by this rank's slices along a dimension, section by section of a fused linear."""
        for key, dim in dims.items():
            parameter = getattr(module, key, None)
            if parameter is None:
                continue
            split = self._split(parameter.shape, dim, outputs)
            own = nn.Parameter(split.take(parameter.data), requires_grad=parameter.requires_grad)
            setattr(module, key, own)
            self.splits[own] = split

    def _split(self, shape: torch.Size, dim: int, outputs: tuple[Outputs, ...]) -> TensorSplit:
        proportions = [self._proportions[kind] for kind in outputs]
        ranges, begin = [], 0
        for kind, proportion in zip(outputs, proportions, strict=True):
            width = shape[dim] * proportion // sum(proportions)
            copies = self._copies_of_keys if kind == "keys" else 1
            own, rest = divmod(width * copies, self.group.size())
            if rest:
                raise UserError(
                    f"parallelism.tensor_parallel: {self.group.size()} does not divide {width} {kind}",
                    "set it to a divisor of that number",
                )
            first = begin + self.group.rank() // copies * own
            ranges.append(range(first, first + own))
            begin += width
        sums = self._key_group if "keys" in outputs else None
        return TensorSplit(shape, dim, tuple(ranges), self.group.rank(), self.group.size(), sums)


# Classes, not forward passes replaced on modules: for those a compiler would make a graph for each layer.


@functools.cache
def _row_class(base: type[nn.Module]) -> type[nn.Module]:
    """A row-parallel linear: its bias is added once, after the sum. `base`: nn.Linear, or transformers' Conv1D."""

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, self.weight if base is nn.Linear else self.weight.T)

    return type(f"Row{base.__name__}", (base,), {"forward": forward})


@functools.cache
def _norm_class(base: type[nn.Module]) -> type[nn.Module]:
    """OLMo 2's norm of all heads together, of which this rank has some: x [..., heads x size].

    `repeated_width`: of all heads, where a head counts once for each rank that has it.
    """

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        squares = sum_both_ways(wide.square().sum(-1, keepdim=True), self.group)
        normalized = wide * torch.rsqrt(squares / self.repeated_width + self.variance_epsilon)
        scaled: torch.Tensor = self.weight * normalized
        return scaled.to(x.dtype)

    return type(f"{base.__name__}OfAllHeads", (base,), {"forward": forward})


def enter_block(enter: Exchange, group: dist.ProcessGroup) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # transformers passes hidden_states by name to most attentions, by position to the MLP
        named = [name for name in ("hidden_states", "key_value_states") if kwargs.get(name) is not None]
        assert args or named
        entered = [enter(states, group) for states in args[:1]]
        return (*entered, *args[1:]), kwargs | {name: enter(kwargs[name], group) for name in named}

    return hook


def _leave_block(leave: Exchange, group: dist.ProcessGroup) -> Any:
    def hook(linear: Any, _: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        total = leave(output, group)
        return total if linear.bias is None else total + linear.bias.to(total.dtype)

    return hook


def _on_output(exchange: Exchange, group: dist.ProcessGroup) -> Any:
    def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return exchange(output[0], group), *output[1:]
        return exchange(output, group)

    return hook
