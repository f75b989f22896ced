"""AdamW over sharded parameters, its state by parameter name, and clipping by the global gradient norm."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hyperpod_ft.config import Training
from hyperpod_ft.engines.tensor_parallel import local, replicas_over_tp


def adamw(trainable: Mapping[str, nn.Parameter], training: Training) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101). Biases and norms, the 1-D parameters, are not decayed."""
    groups = [
        {"params": [p for p in trainable.values() if p.ndim > 1], "weight_decay": training.weight_decay},
        {"params": [p for p in trainable.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
    )


def state_of(optimizer: torch.optim.AdamW, trainable: Mapping[str, nn.Parameter], step: int) -> dict[str, Any]:
    """The moments by parameter name, sharing memory with the optimizer; made, as zeros, where it has none yet.

    `step` is how many updates the moments have seen: AdamW's bias correction needs it.
    """
    moments: dict[str, Any] = {}
    for name, parameter in trainable.items():
        state = optimizer.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] = torch.tensor(float(step))
        moments[name] = {key: state[key] for key in ("exp_avg", "exp_avg_sq")}
    return moments


@torch.no_grad()
def squared_norm(parameters: Iterable[nn.Parameter], tensor_parallel: int) -> torch.Tensor:
    """This rank's share of the squared global gradient norm, fp32 []: the sum over all ranks is the whole.

    An element that lives on several tp ranks counts on each with its share.
    """
    shares: dict[int, list[torch.Tensor]] = {}
    total = torch.zeros(())
    for parameter in parameters:
        if parameter.grad is not None:
            total = total.to(parameter.device)
            shares.setdefault(replicas_over_tp(parameter, tensor_parallel), []).append(local(parameter.grad))
    for replicas, gradients in shares.items():
        norms = torch.stack(torch._foreach_norm(gradients))
        total = total + norms.square().sum() / replicas
    return total


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale all gradients so that their global norm `norm` becomes at most `max_norm`; 0 leaves them alone."""
    scale = max_norm / (norm + 1e-6)  # torch.nn.utils.clip_grad_norm_'s formula
    if max_norm and scale < 1:
        torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], scale)
