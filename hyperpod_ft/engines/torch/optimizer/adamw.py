"""AdamW over this rank's shards of the trained parameters, its state by parameter name."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adamw import adamw

from hyperpod_ft.config.sections.training import Training
from hyperpod_ft.engines.torch import devices
from hyperpod_ft.engines.torch.optimizer.moments import moments
from hyperpod_ft.engines.torch.sharding.trained_weights import TrainedWeights

_EPSILON = 1e-8


class AdamW:
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101). Biases and norms, the 1-D parameters, have no weight decay.

    The update is elementwise, so each rank computes it on plain tensors, wherever they are: on the device, or with
    fused CPU kernels in host memory. It goes group by group, so that one group's weights are uploaded from the host
    while the next is computed.
    """

    def __init__(
        self, trained_weights: TrainedWeights, training: Training, rate_factor: Callable[[str], float]
    ) -> None:
        """`rate_factor`: what the learning rate of the parameter with a given name is multiplied by."""
        self._trained_weights, self._training = trained_weights, training
        self._rate_factor = rate_factor
        self._moments = {
            name: moments(training.optimizer_state, name, trained_weights.master(name))
            for name in trained_weights.parameters
        }
        self.steps = 0  # updates that the moments include; the bias correction needs it

    @torch.no_grad()
    def step(self, learning_rate: float, gradient_norm: torch.Tensor) -> None:
        """Update the parameters with the gradients of the step, clipped by their global norm; drop the gradients.

        `gradient_norm`: fp32 []. It stays on its device, so that the program need not wait for the gradients.
        """
        self.steps += 1
        divisor = clipping_divisor(gradient_norm, self._training.max_grad_norm)
        for names in self._trained_weights.buckets:
            gradients = dict(zip(names, self._trained_weights.take_gradients(names), strict=True))
            for (factor, decay), alike in self._alike(names).items():
                self._update(alike, [gradients[name] for name in alike], divisor, learning_rate * factor, decay)
            self._trained_weights.use_masters(names)

    def _alike(self, names: list[str]) -> dict[tuple[float, float], list[str]]:
        """Parameters by their factor of the learning rate and their weight decay."""
        found: dict[tuple[float, float], list[str]] = {}
        for name in names:
            decay = self._training.weight_decay if len(self._trained_weights.shards[name].shape) > 1 else 0.0
            found.setdefault((self._rate_factor(name), decay), []).append(name)
        return found

    def _update(
        self,
        names: list[str],
        gradients: list[torch.Tensor],
        divisor: torch.Tensor | None,
        rate: float,
        decay: float,
    ) -> None:
        masters = [self._trained_weights.master(name) for name in names]
        device = masters[0].device
        loaded = [self._moments[name].load() for name in names]
        if divisor is not None and devices.fixed_shapes(device):
            torch._foreach_div_(gradients, divisor)  # torch-neuronx's adamw ignores grad_scale
            divisor = None
        adamw(
            masters,
            gradients,
            [first for first, _ in loaded],
            [second for _, second in loaded],
            [],
            # adamw adds 1 to each
            list(torch.full((len(names),), self.steps - 1.0, device=device).unbind()),
            fused=True,
            # what it divides the gradients by, while it reads them
            grad_scale=None if divisor is None else divisor.to(device),
            amsgrad=False,
            beta1=self._training.adam_beta1,
            beta2=self._training.adam_beta2,
            lr=rate,
            weight_decay=decay,
            eps=_EPSILON,
            maximize=False,
        )
        for name, (first, second) in zip(names, loaded, strict=True):
            self._moments[name].store(first, second, self.steps)

    def state(self) -> dict[str, Any]:
        """What is stored of the moments, by parameter name, for checkpoints: {fqn: {exp_avg, exp_avg_sq, ...}}.

        Pieces (sharding/shards.py) where ranks hold different shards. They share memory with the optimizer.
        """
        return {
            name: {key: self._trained_weights.shards[name].wrap(tensor) for key, tensor in stored.tensors().items()}
            for name, stored in self._moments.items()
        }


def clipping_divisor(norm: torch.Tensor, max_norm: float) -> torch.Tensor | None:
    """What gradients of this global norm are divided by, so that it becomes at most `max_norm`: fp32 [], at least 1.

    None for a `max_norm` of 0, which clips nothing.
    """
    return ((norm + 1e-6) / max_norm).clamp_min(1.0) if max_norm else None  # torch.nn.utils.clip_grad_norm_'s formula
