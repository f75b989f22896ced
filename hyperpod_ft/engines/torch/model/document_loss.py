"""The cross entropy of each document of a batch, in the blocks of `summed_cross_entropy`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hyperpod_ft.engines.torch.model.loss import LogitsRule, summed_cross_entropy


def cross_entropy_by_document(
    hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor, rule: LogitsRule, counts: Sequence[int]
) -> torch.Tensor:
    """The sum over each document's positions of -log p(target), fp32 [documents].

    hidden [positions, width] and targets int64 [positions] are those of one document after the other; `counts`: of how
    many positions each. The result has one backward pass.
    """
    if type(head) is nn.Linear and head.weight.requires_grad and torch.is_grad_enabled():
        losses: torch.Tensor = _OfTrainedHead.apply(hidden, head.weight, head.bias, head, targets, rule, counts)
        return losses
    return _losses(hidden, head, targets, rule, counts)


def _losses(
    hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor, rule: LogitsRule, counts: Sequence[int]
) -> torch.Tensor:
    documents = zip(hidden.split(counts), targets.split(counts), strict=True) if counts else ()
    losses = [summed_cross_entropy(states, head, wanted, rule)[None] for states, wanted in documents]
    return torch.cat([hidden.new_zeros(0, dtype=torch.float32), *losses])


class _OfTrainedHead(torch.autograd.Function):
    """Losses are computed without gradients, and again in the backward pass, where each document's weight is known.

    `summed_cross_entropy` has the gradient of the whole head at once: here there is one at a time, not one a document.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        head: nn.Module,
        targets: torch.Tensor,
        rule: LogitsRule,
        counts: Sequence[int],
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, targets)
        ctx.head, ctx.rule, ctx.counts = head, rule, counts
        with torch.no_grad():
            return _losses(hidden, head, targets, rule, counts)

    @staticmethod
    def backward(ctx: Any, scales: torch.Tensor) -> Any:  # type: ignore[override]
        hidden, targets = ctx.saved_tensors
        trained = list(ctx.head.parameters())
        grad_hidden = torch.empty_like(hidden)
        # in 32 bits: in 16, each addition would round
        totals = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in trained]
        begin = 0
        for count, scale in zip(ctx.counts, scales, strict=True):
            given = hidden[begin : begin + count].detach().requires_grad_()
            with torch.enable_grad():
                loss = summed_cross_entropy(given, ctx.head, targets[begin : begin + count], ctx.rule)
            grad_hidden[begin : begin + count], *grads = torch.autograd.grad(loss, [given, *trained], scale)
            for index, grad in enumerate(grads):
                totals[index] += grad
            begin += count
        found = [total.to(parameter.dtype) for total, parameter in zip(totals, trained, strict=True)]
        return grad_hidden, found[0], found[1] if len(found) > 1 else None, None, None, None, None
