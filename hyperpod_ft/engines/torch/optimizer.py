"""AdamW over sharded parameters, its state by parameter name, and clipping by the global gradient norm."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hyperpod_ft.config.run_config import Training
from hyperpod_ft.engines.torch.tensor_parallel import local, replicas_over_tp


class ShardedAdamW:
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101). Biases and norms, the 1-D parameters, have no weight decay.

    The update is elementwise, so each rank computes it on its plain local shards. The result is the same as with
    DTensors, whose dispatch would cost more than the arithmetic on small shards. The moments are DTensors, for
    checkpoints.

    `rate_factor` is what the learning rate of the parameter with a given name is multiplied by.
    """

    def __init__(
        self, trainable: Mapping[str, nn.Parameter], training: Training, rate_factor: Callable[[str], float]
    ) -> None:
        self._trainable = dict(trainable)
        self._moments = {
            name: {"exp_avg": torch.zeros_like(p.detach()), "exp_avg_sq": torch.zeros_like(p.detach())}
            for name, p in trainable.items()
        }
        self._parts = {name: nn.Parameter(local(p.detach())) for name, p in trainable.items()}
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, part in self._parts.items():
            decay = training.weight_decay if part.ndim > 1 else 0.0
            groups.setdefault((decay, rate_factor(name)), []).append(part)
        self._adamw = torch.optim.AdamW(
            [
                {"params": parts, "weight_decay": decay, "rate_factor": factor}
                for (decay, factor), parts in groups.items()
            ],
            betas=(training.adam_beta1, training.adam_beta2),
            foreach=True,
        )
        self.set_steps(0)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update the parameters with their gradients, and drop the gradients."""
        for name, parameter in self._trainable.items():
            # FSDP may have moved its shard since the last step
            self._parts[name].data = local(parameter)
            self._parts[name].grad = local(parameter.grad) if parameter.grad is not None else None
            parameter.grad = None
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate * group["rate_factor"]
        self._adamw.step()

    def state(self) -> dict[str, Any]:
        """The moments by parameter name, sharing memory with the optimizer: {fqn: {exp_avg, exp_avg_sq}}."""
        return self._moments

    def set_steps(self, steps: int) -> None:
        """Set how many updates the moments include; the bias correction needs it."""
        for name, part in self._parts.items():
            moments = {key: local(moment) for key, moment in self._moments[name].items()}
            self._adamw.state[part] = {"step": torch.tensor(float(steps)), **moments}


@torch.no_grad()
def squared_norm(parameters: Iterable[nn.Parameter], tensor_parallel: int) -> torch.Tensor:
    """This rank's share of the squared global gradient norm, fp32 []: the sum over all ranks is the full value.

    An element replicated on n tp ranks counts 1/n on each.
    """
    gradients: dict[int, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            replicas = replicas_over_tp(parameter, tensor_parallel)
            gradients.setdefault(replicas, []).append(local(parameter.grad))
    shares = [torch.stack(torch._foreach_norm(some)).square().sum() / replicas for replicas, some in gradients.items()]
    return torch.stack(shares).sum()


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale all gradients so that their global norm `norm` becomes at most `max_norm`; 0 disables clipping."""
    scale = max_norm / (norm + 1e-6)  # torch.nn.utils.clip_grad_norm_'s formula
    if max_norm and scale < 1:
        torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], scale)
