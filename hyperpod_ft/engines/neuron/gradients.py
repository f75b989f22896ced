"""Corrections of gradients that optimum-neuron 0.4.5 and neuronx-distributed 0.15 omit or count twice."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from neuronx_distributed.optimizer import NeuronZero1Optimizer
from neuronx_distributed.parallel_layers import grads, parallel_state
from optimum.neuron.accelerate import optimizer as accelerated_optimizer
from torch import nn

# Parameters of a fused qkv_proj. Its key and value heads are repeated if there are fewer than tensor-parallel ranks.
_KEY_OR_VALUE = re.compile(r"\.(weight|bias)_[kv]$")
# Qwen3's norms of queries and keys: one norm for all heads, of which each rank has some.
_OF_HEADS = re.compile(r"\.[qk]_norm\.")


def is_replicated(parameter: nn.Parameter) -> bool:
    """Whether every tensor-parallel rank holds the whole parameter."""
    return not getattr(parameter, "tensor_model_parallel", False)


def replicas(name: str, parameter: nn.Parameter, kv_size_multiplier: int) -> int:
    """How many ranks of a tensor-parallel group hold each element of the parameter."""
    if is_replicated(parameter):
        return int(parallel_state.get_tensor_model_parallel_size())
    return kv_size_multiplier if _KEY_OR_VALUE.search(name) else 1


def shard_held(name: str, parameter: nn.Parameter, kv_size_multiplier: int) -> int | None:
    """The index of this rank's shard among those that several tensor-parallel ranks hold; None if only it does."""
    if is_replicated(parameter):
        return 0
    if kv_size_multiplier == 1 or not _KEY_OR_VALUE.search(name):
        return None
    shards = parallel_state.get_tensor_model_parallel_size() // kv_size_multiplier
    return int(parallel_state.get_tensor_model_parallel_rank() % shards)


def ranks_of_same_heads(tensor_parallel_groups: Iterable[list[int]], kv_size_multiplier: int) -> list[list[int]]:
    """The ranks that hold copies of the same key and value heads, for all heads of all tensor-parallel groups.

    optimum-neuron assigns all heads in order, then repeats: rank i of a group of n holds the same heads as rank
    i + n / kv_size_multiplier, on every chip (models/training/transformations_utils.py,
    GQAQKVColumnParallelLinearSpec.create_kv_proj_local_weight_from_regular_weight).
    """
    return [
        group[first :: len(group) // kv_size_multiplier]
        for group in tensor_parallel_groups
        for first in range(len(group) // kv_size_multiplier)
    ]


def sum_key_and_value_gradients_over_copies() -> None:
    """Make neuronx-distributed sum gradients of repeated key and value heads over the ranks with the same heads.

    It groups consecutive ranks (parallel_layers/parallel_state.py, arrange_kv_groups), but on trn1 at
    degree 4 these belong to several tensor-parallel groups, and on trn2 it assumes that neighbours hold copies of one
    head. It then sums gradients of other replicas or other heads, and the copies diverge.
    """
    parallel_state.arrange_kv_groups = lambda groups, degree, kv_size_multiplier, *_: ranks_of_same_heads(
        parallel_state.get_tensor_model_parallel_replica_groups(), kv_size_multiplier
    )


def partial(parameters: Mapping[str, nn.Parameter], *, sequence_parallel: bool) -> list[nn.Parameter]:
    """The replicated parameters whose gradient on each tensor-parallel rank is only a partial sum, in order.

    With sequence parallelism, all of them: a rank sees only its part of the sequence. Without it, the norms over the
    rank's own heads (Qwen3).
    """
    return [
        parameter
        for name, parameter in parameters.items()
        if is_replicated(parameter) and (sequence_parallel or _OF_HEADS.search(name))
    ]


def sum_over_tensor_parallel(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the accumulated gradients of the parameters over the tensor-parallel ranks, in one collective.

    Upstream sums only those of norms, and not even those when gradients accumulate in fp32 (ZeRO-1 with master
    weights). It never sums those of LoRA factors: the ranks' copies diverge, and the exported model is not the trained
    one.
    """
    pairs = ((getattr(parameter, "main_grad", None), parameter.grad) for parameter in parameters)
    summed = (grad if main_grad is None else main_grad for main_grad, grad in pairs)
    held = [gradient for gradient in summed if gradient is not None]
    if not held:
        return
    total = torch.cat([gradient.reshape(-1).float() for gradient in held])
    dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
    for gradient, part in zip(held, total.split([gradient.numel() for gradient in held]), strict=True):
        gradient.copy_(part.reshape(gradient.shape))


def disable_upstream_sum() -> None:
    """Turn off upstream's own sum before the optimizer step, which would sum the gradients a second time."""
    accelerated_optimizer.allreduce_sequence_parallel_gradients = lambda optimizer: None


def count_each_element_once(optimizer: Any, replicas_of: Mapping[int, int]) -> None:
    """Patch the optimizer to clip by the norm of the whole model's gradient.

    Upstream counts repeated key and value heads once per copy. `replicas_of`: results of `replicas`, by parameter id.
    """
    inner = optimizer.optimizer
    if isinstance(inner, NeuronZero1Optimizer):

        def shards_and_norm(norm_type: float) -> tuple[list[torch.Tensor], torch.Tensor]:
            pairs = [
                (parameter, shard)
                for wholes, shards in zip(inner.param_groups, inner.base_optimizer.param_groups, strict=True)
                for parameter, shard in zip(wholes["params"], shards["params"], strict=True)
                if shard.grad is not None
            ]
            norm = _norm(
                ((shard.grad, replicas_of[id(parameter)]) for parameter, shard in pairs), inner._sharding_groups
            )
            return [shard for _, shard in pairs], norm

        inner._get_params_and_grad_norm = shards_and_norm
        return

    def clip(parameters: list[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        norm = _norm((p.grad, replicas_of[id(p)]) for p in parameters if p.grad is not None)
        grads.clip_grads_with_norm([p for p in parameters if p.grad is not None], norm, max_norm)
        return norm

    accelerated_optimizer.clip_grad_norm = clip


def _norm(
    gradients: Iterable[tuple[torch.Tensor, int]], sharding_groups: list[list[int]] | None = None
) -> torch.Tensor:
    """The 2-norm over all ranks of one model, fp32 [1]; the graph is the same on every rank."""
    squares = [gradient.detach().float().pow(2).sum() / count for gradient, count in gradients]
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
