"""Expert parallelism: the ranks of axis `ep` divide the experts of each layer, and exchange tokens around them.

GShard (Lepikhin et al., arXiv:2006.16668, section 3.2). Each rank routes its own tokens. It sends a token once to each
rank that has some of its experts; there, transformers' own forward pass computes with the experts of that rank, and
their weighted sum returns. What the ranks exchange depends on the routing, so the program waits for the device in each
layer, for the numbers of tokens, and again where the layer is recomputed.

Ranks must exchange in one order, also in the backward pass. So a rank that gets no token takes part with none, and its
experts with gradients of zero. Each exchange is one operation that keeps an index of its tokens: where layers are
computed again, that begins before the exchange on every rank.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from hyperpod_ft.engines.torch.lora.adapters import is_factor
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
            f"parallelism.expert_parallel: {type(model).__name__} computes its experts in a way that cannot be divided",
            "set it to 1",
        )
    splits = {}
    for path, module in found.items():
        divided: Any = module
        for name, parameter in [*module.named_parameters(path)]:
            splits[name] = split = _split(name, parameter.shape, divided.num_experts, group)
            owner, _, key = name.rpartition(".")
            own = nn.Parameter(split.take(parameter.data), requires_grad=parameter.requires_grad)
            setattr(model.get_submodule(owner), key, own)
        divided.num_experts //= group.size()
        divided.own_forward, divided.group = divided.forward, group
        vars(divided).pop("forward", None)  # that of adapters
        divided.__class__ = _divided_class(divided.__class__)
    return splits


@functools.cache
def _divided_class(base: type[nn.Module]) -> type[nn.Module]:
    # a class: for forward passes replaced on modules, a compiler would make a graph for each layer
    return type(f"Divided{base.__name__}", (_DividedExperts, base), {})


def _split(name: str, shape: torch.Size, experts: int, group: dist.ProcessGroup) -> TensorSplit:
    """Which part of a parameter is of this rank's experts: along dimension 0, but for factors B of adapters."""
    ranks, rank = group.size(), group.rank()
    dim = 1 if name.endswith(".lora_B.weight") else 0
    each, own = shape[dim] // experts, experts // ranks
    if experts % ranks or not (shape[0] == experts or is_factor(name)):
        raise UserError(
            f"parallelism.expert_parallel: {ranks} ranks cannot divide {name}, of {experts} experts", "set it to 1"
        )
    # B has, for each column of an expert's, those of all experts (checkpoint/adapters/experts.py)
    width, blocks = (own, each) if dim else (own * each, 1)
    firsts = (block * experts + rank * width for block in range(blocks))
    return TensorSplit(shape, dim, tuple(range(first, first + width) for first in firsts), rank, ranks)


@dataclass(frozen=True)
class _Exchange:
    """What a rank exchanges in one layer. `tokens`, int64 [sent]: which of its own, by the rank that gets them."""

    group: dist.ProcessGroup
    count: int  # of the rank's own tokens
    k: int  # experts of a token
    sent: list[int]  # tokens, to each rank
    received: list[int]

    def there(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of own tokens [count, ...] to those of received tokens [received, ...]."""
        return _all_to_all(rows.index_select(0, tokens), self.received, self.sent, self.group)

    def back(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of received tokens [received, ...] to those of own tokens [count, ...], summed over ranks."""
        return _sum_at(tokens, self.count, _all_to_all(rows, self.sent, self.received, self.group))


def _all_to_all(
    rows: torch.Tensor, received: list[int] | None, sent: list[int] | None, group: dist.ProcessGroup
) -> torch.Tensor:
    result: torch.Tensor = wait_tensor(all_to_all_single(rows.contiguous(), received, sent, group))
    return result


def _sum_at(places: torch.Tensor, count: int, rows: torch.Tensor) -> torch.Tensor:
    """[count, ...] with each of the rows [places, ...] added at its place, in fp32."""
    total = torch.zeros(count, *rows.shape[1:], dtype=torch.float32, device=rows.device)
    return total.index_add_(0, places, rows.float()).to(rows.dtype)


class _DividedExperts(nn.Module):
    """A module of experts, of which this rank has some. `own_forward` computes with these."""

    num_experts: int
    group: dist.ProcessGroup
    own_forward: Callable[..., torch.Tensor]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`hidden` [tokens, width]; `chosen`, `weights` [tokens, k], of each token's experts -> [tokens, width]."""
        exchange, tokens, pairs, numbers = self._route(chosen)
        result, their_weights = _Send.apply(hidden, weights, tokens, pairs, exchange)  # type: ignore[no-untyped-call]
        idle: tuple[nn.Parameter, ...] = ()
        if len(pairs):
            result = self.own_forward(result, numbers[:, None], their_weights[:, None])
        else:
            idle = tuple(parameter for parameter in self.parameters() if parameter.requires_grad)
        combined: torch.Tensor = _Return.apply(result, tokens, pairs, exchange, *idle)  # type: ignore[no-untyped-call]
        return combined

    @torch.no_grad()
    def _route(self, chosen: torch.Tensor) -> tuple[_Exchange, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where the rank's tokens go, and which of its experts compute with those that it gets.

        Returns int64 [sent], its tokens in the order in which they are sent; [pairs], each pair of a received token and
        an own expert, as its place in [received, k]; and [pairs], the number of that expert among the rank's own.
        """
        own, ranks = self.num_experts, self.group.size()
        of_ranks = (chosen // own)[..., None] == torch.arange(ranks, device=chosen.device)
        wanted = of_ranks.any(1)
        # tokens, and pairs, for each rank
        counts = torch.stack([wanted.sum(0), of_ranks.sum((0, 1))], 1)
        both_ways = torch.stack([counts, _all_to_all(counts, None, None, self.group)])
        (sent, _), (received, pairs) = (each.unbind(1) for each in both_ways.cpu())
        exchange = _Exchange(self.group, len(chosen), chosen.shape[1], sent.tolist(), received.tolist())
        tokens = torch.nonzero_static(wanted.T, size=int(sent.sum()))[:, 1]
        numbers = (exchange.there(chosen, tokens) - self.group.rank() * own).flatten()
        places = torch.nonzero_static((numbers >= 0) & (numbers < own), size=int(pairs.sum()))[:, 0]
        return exchange, tokens, places, numbers.index_select(0, places)


class _Send(torch.autograd.Function):
    """Hidden states [tokens, width] and weights [tokens, k] to those of a rank's pairs, [pairs, width] and [pairs]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        tokens: torch.Tensor,
        pairs: torch.Tensor,
        exchange: _Exchange,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(tokens, pairs)
        ctx.exchange = exchange
        of_pairs = exchange.there(hidden, tokens).index_select(0, pairs // exchange.k)
        return of_pairs, exchange.there(weights, tokens).flatten().index_select(0, pairs)

    @staticmethod
    def backward(ctx: Any, of_hidden: torch.Tensor, of_weights: torch.Tensor) -> Any:
        (tokens, pairs), exchange = ctx.saved_tensors, ctx.exchange
        received, k = sum(exchange.received), exchange.k
        hidden = exchange.back(_sum_at(pairs // k, received, of_hidden), tokens)
        weights = exchange.back(_sum_at(pairs, received * k, of_weights).view(-1, k), tokens)
        return hidden, weights, None, None, None


class _Return(torch.autograd.Function):
    """What the rank's pairs compute, [pairs, width], to the sums for each of its tokens, [tokens, width].

    `idle`: parameters that this pass does not use. Their gradients are zero.
    """

    @staticmethod
    def forward(
        ctx: Any,
        computed: torch.Tensor,
        tokens: torch.Tensor,
        pairs: torch.Tensor,
        exchange: _Exchange,
        *idle: nn.Parameter,
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens, pairs)
        ctx.exchange, ctx.idle = exchange, idle
        return exchange.back(_sum_at(pairs // exchange.k, sum(exchange.received), computed), tokens)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (tokens, pairs), exchange = ctx.saved_tensors, ctx.exchange
        of_pairs = exchange.there(gradient, tokens).index_select(0, pairs // exchange.k)
        return of_pairs, None, None, None, *(torch.zeros_like(parameter) for parameter in ctx.idle)
