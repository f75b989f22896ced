"""Expert parallelism: the ranks of axis `ep` divide the experts of each layer, and exchange tokens around them.

GShard (Lepikhin et al., arXiv:2006.16668, section 3.2). Each rank routes its own tokens. It sends a token once to each
rank that has some of its experts; there, transformers' own forward pass computes with the experts of that rank, and
their weighted sum returns. What the ranks exchange depends on the routing, so the program waits for the device once in
a layer, for the numbers of tokens.

Ranks must exchange in one order, also in the backward pass. So a rank that gets no token takes part with none, and its
experts with gradients of zero. Each exchange is one operation that keeps an index of its tokens: where layers are
computed again, that begins before the exchange on every rank.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from hyperpod_ft.engines.torch.sharding.shards import TensorSplit
from hyperpod_ft.errors import UserError


def divide(model: PreTrainedModel, mesh: DeviceMesh) -> dict[str, TensorSplit]:
    """Divide the experts over axis `ep`, in place; returns what became of their parameters, by FQN.

    The modules that hold them are those with transformers' interface of experts. They take hidden states [tokens,
    width], and of each token the numbers and weights of its experts, both [tokens, k]. The model is whole on every
    rank, with its adapters, or on the meta device. Raises UserError when its class has no such module, or the ranks do
    not divide its experts.
    """
    group = mesh.get_group("ep")
    found = {path: module for path, module in model.named_modules() if hasattr(module, "_is_expert_parallel")}
    if not found:
        raise UserError(
            f"parallelism.expert_parallel: {type(model).__name__} has no experts, or computes them in a way that cannot"
            " be divided",
            "set it to 1",
        )
    splits = {}
    for path, module in found.items():
        for name, parameter in [*module.named_parameters()]:
            split = _split(parameter.shape, name, module, group)
            owner, _, key = name.rpartition(".")
            own = nn.Parameter(split.take(parameter.data), requires_grad=parameter.requires_grad)
            setattr(module.get_submodule(owner), key, own)
            splits[f"{path}.{name}"] = split
        divided: Any = module
        divided.num_experts //= group.size()
        divided.own_forward, divided.group = divided.forward, group
        vars(divided).pop("forward", None)  # that of adapters
        divided.__class__ = _divided_class(type(divided))
    return splits


@functools.cache
def _divided_class(base: type[nn.Module]) -> type[nn.Module]:
    # a class: for forward passes replaced on modules, a compiler would make a graph for each layer
    return type(f"Divided{base.__name__}", (_DividedExperts, base), {})


def _split(shape: torch.Size, name: str, module: Any, group: dist.ProcessGroup) -> TensorSplit:
    """Which part of a parameter is of this rank's experts; factors of adapters have those of all side by side."""
    experts, ranks, rank = module.num_experts, group.size(), group.rank()
    own = experts // ranks
    dim = 1 if name.endswith("lora_B.weight") else 0
    if experts % ranks or shape[dim] % experts:
        raise UserError(
            f"parallelism.expert_parallel: {ranks} does not divide {name} of {experts} experts", "set it to 1"
        )
    each = shape[dim] // experts
    # B has, for each column of an expert's, those of all experts (checkpoint/adapters/experts.py)
    width, blocks = (own, each) if dim else (own * each, 1)
    firsts = (block * experts + rank * width for block in range(blocks))
    return TensorSplit(shape, dim, tuple(range(first, first + width) for first in firsts), rank, ranks)


class _Exchanged(NamedTuple):
    """How many tokens a rank exchanges with each of its group."""

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        """[sent, ...] to [received, ...], by rank."""
        return _all_to_all(rows, self.received, self.sent, self.group)

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """[received, ...] to [sent, ...], by rank."""
        return _all_to_all(rows, self.sent, self.received, self.group)


def _all_to_all(
    rows: torch.Tensor, received: list[int] | None, sent: list[int] | None, group: dist.ProcessGroup
) -> torch.Tensor:
    result: torch.Tensor = wait_tensor(all_to_all_single(rows.contiguous(), received, sent, group))
    return result


class _DividedExperts(nn.Module):
    """A module of experts, of which this rank has some. `own_forward` computes with these."""

    num_experts: int
    group: dist.ProcessGroup
    own_forward: Callable[..., torch.Tensor]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`hidden` [tokens, width]; `chosen`, `weights` [tokens, k], of each token's experts -> [tokens, width]."""
        ranks, own = self.group.size(), self.num_experts
        with torch.no_grad():
            there = (chosen // own)[..., None] == torch.arange(ranks, device=chosen.device)
            wanted = there.any(1)
            # tokens, and pairs of a token and an expert, for each rank
            counts = torch.stack([wanted.sum(0), there.sum((0, 1))], 1)
            in_all = torch.stack([counts, _all_to_all(counts, None, None, self.group)])
            (sent, _), (received, pairs) = (each.unbind(1) for each in in_all.cpu())
            exchanged = _Exchanged(self.group, sent.tolist(), received.tolist())
            tokens = torch.nonzero_static(wanted.T, size=sum(exchanged.sent))[:, 1]
            numbers = exchanged.there(chosen.index_select(0, tokens)) - self.group.rank() * own
            mine = ((numbers >= 0) & (numbers < own)).flatten()
            pair = torch.nonzero_static(mine, size=int(pairs.sum()))[:, 0]
            row, number = pair // chosen.shape[1], numbers.flatten().index_select(0, pair)
        arrived, their_weights = _Send.apply(hidden, weights, tokens, exchanged)  # type: ignore[no-untyped-call]
        result, idle = arrived, tuple(each for each in self.parameters() if each.requires_grad)
        if len(pair):
            computed = self.own_forward(
                arrived.index_select(0, row), number[:, None], their_weights.flatten().index_select(0, pair)[:, None]
            )
            result, idle = torch.zeros_like(arrived).index_add(0, row, computed), ()
        combined: torch.Tensor = _Return.apply(result, tokens, len(hidden), exchanged, *idle)  # type: ignore[no-untyped-call]
        return combined


class _Send(torch.autograd.Function):
    """Hidden states [tokens, width] and weights [tokens, k], of which this rank gets those of its own experts."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weights: torch.Tensor, tokens: torch.Tensor, exchanged: _Exchanged
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(tokens)
        ctx.exchanged, ctx.count = exchanged, len(hidden)
        first, second = (exchanged.there(each.index_select(0, tokens)) for each in (hidden, weights))
        return first, second

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (tokens,) = ctx.saved_tensors
        found = (_at(tokens, ctx.count, ctx.exchanged.back(each)) for each in gradients)
        return *found, None, None


class _Return(torch.autograd.Function):
    """The sums [received, width] for the tokens of other ranks, as the sums over ranks for this one's [count, width].

    `idle`: parameters that this pass does not use. Their gradients are zero.
    """

    @staticmethod
    def forward(
        ctx: Any, result: torch.Tensor, tokens: torch.Tensor, count: int, exchanged: _Exchanged, *idle: nn.Parameter
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.exchanged, ctx.idle = exchanged, idle
        return _at(tokens, count, exchanged.back(result))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (tokens,) = ctx.saved_tensors
        own = ctx.exchanged.there(gradient.index_select(0, tokens))
        return own, None, None, None, *(torch.zeros_like(parameter) for parameter in ctx.idle)


def _at(tokens: torch.Tensor, count: int, rows: torch.Tensor) -> torch.Tensor:
    """[count, ...] with each of the rows [sent, ...] added where its token is."""
    return rows.new_zeros(count, *rows.shape[1:]).index_add_(0, tokens, rows)
