"""Gradients as they should be: what optimum-neuron 0.4.5 and neuronx-distributed 0.15 leave out or count twice."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from neuronx_distributed.optimizer import NeuronZero1Optimizer
from neuronx_distributed.parallel_layers import grads, parallel_state
from optimum.neuron.accelerate import optimizer as accelerated_optimizer
from torch import nn

# Of a fused qkv_proj, whose key and value heads are repeated when there are fewer than tensor-parallel ranks.
_KEY_OR_VALUE = re.compile(r"\.(weight|bias)_[kv]$")
# Qwen3's norms of queries and keys: one for all heads, and each rank has some of the heads.
_OF_HEADS = re.compile(r"\.[qk]_norm\.")


def is_replicated(parameter: nn.Parameter) -> bool:
    """Whether every tensor-parallel rank holds all of it."""
    return not getattr(parameter, "tensor_model_parallel", False)


def copies(name: str, parameter: nn.Parameter, kv_size_multiplier: int) -> int:
    """How many ranks of a tensor-parallel group hold each element of the parameter."""
    if is_replicated(parameter):
        return int(parallel_state.get_tensor_model_parallel_size())
    return kv_size_multiplier if _KEY_OR_VALUE.search(name) else 1


def part_held(name: str, parameter: nn.Parameter, kv_size_multiplier: int) -> int | None:
    """Which part of the parameter this rank holds, of those that several tensor-parallel ranks hold; None: its own."""
    if is_replicated(parameter):
        return 0
    if kv_size_multiplier == 1 or not _KEY_OR_VALUE.search(name):
        return None
    parts = parallel_state.get_tensor_model_parallel_size() // kv_size_multiplier
    return int(parallel_state.get_tensor_model_parallel_rank() % parts)


def ranks_of_same_heads(tensor_parallel_groups: Iterable[list[int]], kv_size_multiplier: int) -> list[list[int]]:
    """The ranks that hold copies of the same key and value heads, for all heads of all tensor-parallel groups.

    optimum-neuron deals out all heads, then all of them again: rank i of a group of n holds what rank
    i + n / kv_size_multiplier holds, on every chip (models/training/transformations_utils.py,
    GQAQKVColumnParallelLinearSpec.create_kv_proj_local_weight_from_regular_weight).
    """
    return [
        group[first :: len(group) // kv_size_multiplier]
        for group in tensor_parallel_groups
        for first in range(len(group) // kv_size_multiplier)
    ]


def sum_key_and_value_gradients_over_copies() -> None:
    """Have gradients of repeated key and value heads summed over the ranks that hold the same heads.

    neuronx-distributed counts consecutive ranks (parallel_layers/parallel_state.py, arrange_kv_groups), but on trn1
    those of degree 4 belong to several tensor-parallel groups; and on trn2 it assumes that neighbours hold copies of
    one head. Gradients of other replicas or other heads are then summed, and the copies drift apart.
    """
    parallel_state.arrange_kv_groups = lambda groups, degree, kv_size_multiplier, *_: ranks_of_same_heads(
        parallel_state.get_tensor_model_parallel_replica_groups(), kv_size_multiplier
    )


def partial(parameters: Mapping[str, nn.Parameter], *, sequence_parallel: bool) -> list[nn.Parameter]:
    """The replicated parameters of whose gradients each tensor-parallel rank has a part only, in order.

    With sequence parallelism all of them: a rank sees its part of the sequence. Without, those that work on the rank's
    own heads (Qwen3).
    """
    return [
        parameter
        for name, parameter in parameters.items()
        if is_replicated(parameter) and (sequence_parallel or _OF_HEADS.search(name))
    ]


def sum_over_tensor_parallel(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the gradients that have added up in the parameters over the tensor-parallel ranks, all in one collective.

    Upstream sums those of norms alone, and not at all where gradients add up in fp32 (ZeRO-1 with master weights), and
    leaves out the factors of LoRA: the ranks' copies drift apart, and what is exported is not what was trained.
    """
    summed = [p.grad if getattr(p, "main_grad", None) is None else p.main_grad for p in parameters]
    held = [gradient for gradient in summed if gradient is not None]
    if not held:
        return
    total = torch.cat([gradient.reshape(-1).float() for gradient in held])
    dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
    for gradient, part in zip(held, total.split([gradient.numel() for gradient in held]), strict=True):
        gradient.copy_(part.reshape(gradient.shape))


def leave_sums_to_the_kit() -> None:
    """Upstream's own sum, before the optimizer's step, would come a second time."""
    accelerated_optimizer.allreduce_sequence_parallel_gradients = lambda optimizer: None


def count_each_element_once(optimizer: Any, copies_of: Mapping[int, int]) -> None:
    """Have the optimizer clip by the norm of the whole model's gradient.

    Upstream counts repeated key and value heads once a copy. `copies_of`: see `copies`, by the parameter's id.
    """
    inner = optimizer.optimizer
    if isinstance(inner, NeuronZero1Optimizer):

        def parts_and_norm(norm_type: float) -> tuple[list[torch.Tensor], torch.Tensor]:
            pairs = [
                (parameter, part)
                for wholes, parts in zip(inner.param_groups, inner.base_optimizer.param_groups, strict=True)
                for parameter, part in zip(wholes["params"], parts["params"], strict=True)
                if part.grad is not None
            ]
            norm = _norm(((part.grad, copies_of[id(parameter)]) for parameter, part in pairs), inner._sharding_groups)
            return [part for _, part in pairs], norm

        inner._get_params_and_grad_norm = parts_and_norm
        return

    def clip(parameters: list[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
        norm = _norm((parameter.grad, copies_of[id(parameter)]) for parameter in with_gradient)
        grads.clip_grads_with_norm(with_gradient, norm, max_norm)
        return norm

    accelerated_optimizer.clip_grad_norm = clip


def _norm(
    gradients: Iterable[tuple[torch.Tensor, int]], sharding_groups: list[list[int]] | None = None
) -> torch.Tensor:
    """The 2-norm over all ranks of one model, fp32 [1]; the same graph on each of them."""
    squares = [gradient.detach().float().pow(2).sum() / copies for gradient, copies in gradients]
    total = torch.stack(squares).sum().reshape(1)
    for group in (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    ):
        if group.size() > 1:
            dist.all_reduce(total, group=group)
    if sharding_groups is not None:
        grads.all_reduce("sum", [total], groups=sharding_groups)
    return total.sqrt()
