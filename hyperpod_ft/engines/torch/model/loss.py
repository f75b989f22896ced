"""Cross entropy from hidden states, a block of positions at a time: the logits of a batch never exist together.

The gradient of a sum of cross entropies is known as soon as the logits are, softmax less one-hot, so one pass over the
blocks computes the loss and the gradients of hidden states, output matrix and bias; the backward pass only scales them.
Logits are multiplied by `scale`, then bent by `softcap` c to c tanh(x / c) (Gemma Team, arXiv:2408.00118, section 2).

Where the head is divided over tensor-parallel ranks by rows (vocabulary_parallel.py), each computes the logits of its
own entries of the vocabulary. The largest logit of a position, the sum of exponentials and the target's logit, one
number each, are all that the ranks exchange; the gradients of hidden states add up over them. A block then has as many
more positions as there are ranks: its logits take the same memory on each, and there are fewer exchanges.

On a GPU, memory is read and written as rarely as possible: a compiler fuses what happens between the two products of
a block, so that nothing of the size of its logits exists in fp32.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyperpod_ft.data.packing import IGNORED
from hyperpod_ft.engines.torch import devices
from hyperpod_ft.engines.torch.lora.adapters import LoraLinear
from hyperpod_ft.engines.torch.model.vocabulary_parallel import VocabularyRows, vocabulary_rows_of
from hyperpod_ft.engines.torch.tensor_collectives import copy_to_ranks
from hyperpod_ft.planning.torch.memory import loss_block

# The number of rows of a block's logits that stay in a CPU's cache from one operation to the next.
_CACHED_ROWS = 16


@dataclass(frozen=True)
class LogitsRule:
    """What a family does to the output of its head; `fused`: a compiler makes one pass of that and of the softmax."""

    scale: float = 1.0
    softcap: float | None = None
    fused: bool = False

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def summed_cross_entropy(
    hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor, rule: LogitsRule
) -> torch.Tensor:
    """The sum over positions of -log p(target), fp32 [].

    hidden [positions, width] are the inputs of the head; targets int64 [positions], where IGNORED counts nothing.
    Shapes do not depend on how many count. The result has one backward pass. Collective where the head is divided.
    """
    if type(head) is nn.Linear and torch.is_grad_enabled() and head.weight.requires_grad:
        own_rows, block, hidden = _rows_and_block(head, hidden, rule)
        loss: torch.Tensor = _LossSum.apply(  # type: ignore[no-untyped-call]
            hidden, head.weight, head.bias, targets, rule, own_rows, block
        )
        return loss
    return cross_entropies(hidden, head, targets, rule).sum()


def cross_entropies(hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor, rule: LogitsRule) -> torch.Tensor:
    """The cross entropy of each position, fp32 [positions], so that they can have different weights.

    A head that is trained takes one more product than for the sum: its gradient needs the weights, which are known in
    the backward pass only.
    """
    own_rows, block, hidden = _rows_and_block(head, hidden, rule)
    if type(head) is nn.Linear:
        weight: torch.Tensor = head.weight
        bias: torch.Tensor | None = head.bias
        if not torch.is_grad_enabled():
            # autograd.Function asks for gradients of whatever requires them, also under no_grad
            hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
        losses: torch.Tensor = _LossPerPosition.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, rule, own_rows, block
        )
        return losses
    # a head with an adapter computes its logits again in the backward pass
    blocks = zip(hidden.split(block), targets.split(block), strict=True)
    # all blocks share DoRA's norms, for which the whole matrix is read
    shared: tuple[torch.Tensor, ...] = ()
    if isinstance(head, LoraLinear) and head.lora_magnitude_vector is not None:
        shared = (head.ratio(head.base_weight(hidden.dtype)),)

    def of_block(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _LossesOfLogits.apply(  # type: ignore[no-untyped-call]
            head(x, *shared), target, rule, own_rows
        )
        return found

    return torch.cat([checkpoint(of_block, x, target, use_reentrant=False) for x, target in blocks])


def document_cross_entropies(
    hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor, rule: LogitsRule, counts: Sequence[int]
) -> torch.Tensor:
    """The cross entropy summed over each document, fp32 [documents]; `counts`: its positions, in order."""
    losses = cross_entropies(hidden, head, targets, rule)
    return torch.stack([part.sum() for part in losses.split(counts)]) if counts else losses.new_zeros(0)


def _rows_and_block(
    head: nn.Module, hidden: torch.Tensor, rule: LogitsRule
) -> tuple[VocabularyRows | None, int, torch.Tensor]:
    """The rows of a divided head, the positions of a block, and hidden states whose gradients add up over ranks."""
    own_rows = vocabulary_rows_of(head)
    if own_rows is None:
        return None, loss_block(fused=rule.fused and type(head) is nn.Linear), hidden
    return own_rows, loss_block(fused=False) * own_rows.group.size(), copy_to_ranks(hidden, own_rows.group)


class _LossesOfLogits(torch.autograd.Function):
    """Losses [positions] from the output of a head [positions, vocabulary]."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, rule: LogitsRule, own_rows: VocabularyRows | None
    ) -> torch.Tensor:
        gradient = logits.to(torch.float32, copy=True)
        losses, factor = _softmax_less_one_hot(gradient, targets[:, None], rule, own_rows)
        ctx.save_for_backward(gradient.mul_(factor))
        ctx.dtype = logits.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, scales: torch.Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return (gradient * scales[:, None]).to(ctx.dtype), None, None, None


class _LossPerPosition(torch.autograd.Function):
    """Losses [positions] of a linear head."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        of_hidden, *of_head = ctx.needs_input_grad[:3]
        ctx.later, ctx.dtypes = any(of_head), _dtypes(*given[:3])
        losses, grad_hidden, _, _ = _in_blocks(*given, wanted=(of_hidden and not ctx.later, False, False))
        if ctx.later:
            ctx.save_for_backward(*given[:4])
            ctx.settings = given[4:]
        else:
            ctx.save_for_backward(grad_hidden)
        return losses

    @staticmethod
    def backward(ctx: Any, scales: torch.Tensor) -> Any:
        if ctx.later:
            _, *grads = _in_blocks(*ctx.saved_tensors, *ctx.settings, wanted=ctx.needs_input_grad[:3], scales=scales)
        else:
            grads = [ctx.saved_tensors[0].mul_(scales[:, None]), None, None]
        return (*_cast(grads, ctx.dtypes), *[None] * 4)


class _LossSum(torch.autograd.Function):
    """The sum of the losses of a linear head, whose gradients are known as soon as it is."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        losses, *grads = _in_blocks(*given, wanted=ctx.needs_input_grad[:3])
        ctx.save_for_backward(*grads)
        ctx.dtypes = _dtypes(*given[:3])
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> Any:
        # in place, since that of the weight is as large as the head
        grads = [grad if grad is None else grad.mul_(scale) for grad in ctx.saved_tensors]
        return (*_cast(grads, ctx.dtypes), *[None] * 4)


def _dtypes(*tensors: torch.Tensor | None) -> list[torch.dtype | None]:
    return [None if tensor is None else tensor.dtype for tensor in tensors]


def _cast(grads: list[torch.Tensor | None], dtypes: list[torch.dtype | None]) -> list[torch.Tensor | None]:
    return [None if grad is None else grad.to(dtype) for grad, dtype in zip(grads, dtypes, strict=True)]


def _in_blocks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    rule: LogitsRule,
    own_rows: VocabularyRows | None,
    block: int,
    *,
    wanted: Sequence[bool],
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Losses, fp32 [positions], and gradients of their sum by hidden, weight and bias, where `wanted`.

    Those of weight and bias are fp32.

    `scales`: what the losses are multiplied by in that sum, fp32 [positions].
    """
    losses = torch.zeros(len(hidden), device=hidden.device)
    grad_hidden = torch.empty_like(hidden) if wanted[0] else None
    # sums over blocks in 32 bits: in 16, each addition would round
    grad_weight = torch.empty_like(weight, dtype=torch.float32) if wanted[1] else None
    grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wanted[2] else None
    # every block uses the same memory: that much is returned to the system whenever it is freed
    computed = hidden.new_empty(min(len(hidden), block), len(weight))
    fused = rule.fused and own_rows is None and len(hidden) > 0
    exact = computed if fused or computed.dtype == torch.float32 else torch.empty_like(computed, dtype=torch.float32)
    # at least one block, if only an empty one: it fills the gradients
    for begin in range(0, max(1, len(hidden)), block):
        part = slice(begin, begin + block)
        x, target = hidden[part], targets[part, None]
        gradient, logits = computed[: len(x)], exact[: len(x)]
        _linear(x, weight, bias, out=gradient)
        if fused:
            devices.let_vary(gradient, dimension=0)
            devices.let_vary(target, dimension=0)
            gradient, losses[part], factor = _compiled()(gradient, target, rule.scale, rule.softcap)
        else:
            if exact is not computed:
                logits.copy_(gradient)
            # ranks that share the vocabulary exchange once for a block
            few = _CACHED_ROWS if logits.device.type == "cpu" and own_rows is None else max(1, len(logits))
            rows = zip(logits.split(few), target.split(few), strict=True)
            found, factors = zip(*(_softmax_less_one_hot(some, of, rule, own_rows) for some, of in rows), strict=True)
            losses[part], factor = torch.cat(found), torch.cat(factors)
            if exact is not computed:
                gradient.copy_(logits)
        if scales is not None:
            factor = factor * scales[part, None]
        # the factors belong to rows: they are cheaper on rows of hidden states than on rows of logits
        if grad_hidden is not None:
            grad_hidden[part] = (gradient @ weight) * factor
        if grad_weight is not None:
            _add_product(grad_weight, gradient.t(), (x * factor).to(weight.dtype), first=begin == 0)
        if grad_bias is not None:
            few = loss_block(fused=False)  # in fp32, of a block that is fused
            for some, by in zip(gradient.split(few), factor.split(few), strict=True):
                grad_bias += some.t().float() @ by.flatten()
    return losses, grad_hidden, grad_weight, grad_bias


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, first: bool) -> None:
    """Add the product to `total`, fp32; the `first` one replaces what it holds."""
    if left.dtype == total.dtype:
        total.addmm_(left, right, beta=0 if first else 1)
    elif first:
        total.copy_(left @ right)
    else:
        total += left @ right


def softmax_less_one_hot_at_once(
    logits: torch.Tensor, target: torch.Tensor, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `_softmax_less_one_hot` computes, for a compiler to fuse: gradient (logits' dtype), losses, factors.

    Each element of the logits is read twice and written once.
    """
    counted = target != IGNORED
    target = target.clamp(min=0)
    bent = LogitsRule(scale, softcap)(logits.float())
    largest = bent.amax(1, keepdim=True)
    exponentials = (bent - largest).exp()
    total = exponentials.sum(1, keepdim=True)
    chosen = LogitsRule(scale, softcap)(logits.gather(1, target).float())
    is_target = torch.arange(logits.shape[1], device=logits.device) == target
    gradient = torch.where(is_target, exponentials - total, exponentials)
    if softcap is not None:
        gradient = gradient * (1 - (bent / softcap).square())
    losses = torch.where(counted, total.log() + largest - chosen, 0).flatten()
    return gradient.to(logits.dtype), losses, torch.where(counted, scale / total, 0)


@functools.cache
def _compiled() -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    # not at import: what compiles takes a second to import
    return torch.compile(softmax_less_one_hot_at_once)


def _softmax_less_one_hot(
    logits: torch.Tensor, target: torch.Tensor, rule: LogitsRule, own_rows: VocabularyRows | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Overwrite the output of the head with the loss's gradient by it, but for a factor of each row.

    logits fp32 [rows, vocabulary]; target int64 [rows, 1], of the whole vocabulary. Returns the losses [rows] and the
    factors [rows, 1].
    """
    counted = target != IGNORED
    target = target.clamp(min=0)
    is_own = None
    if own_rows:
        is_own = (target >= own_rows.own.start) & (target < own_rows.own.stop)
        target = torch.where(is_own, target - own_rows.own.start, 0)
    slope = None
    if rule.scale != 1:
        logits.mul_(rule.scale)
    if rule.softcap is not None:
        logits.div_(rule.softcap).tanh_()
        slope = 1 - logits.square()
        logits.mul_(rule.softcap)
    chosen = logits.gather(1, target)
    largest = logits.amax(1, keepdim=True)
    if own_rows:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=own_rows.group)
    exponentials = logits.sub_(largest).exp_()
    total = exponentials.sum(1, keepdim=True)
    if own_rows and is_own is not None:
        both = torch.stack([total, chosen * is_own])
        dist.all_reduce(both, group=own_rows.group)
        total, chosen = both
    losses = torch.where(counted, total.log() + largest - chosen, 0).flatten()
    gradient = exponentials.scatter_add_(1, target, -total if is_own is None else -total * is_own)
    if slope is not None:
        gradient.mul_(slope)
    return losses, torch.where(counted, rule.scale / total, 0)
