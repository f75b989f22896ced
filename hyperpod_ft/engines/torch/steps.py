"""The outcome of an optimizer step: computed on the device, and read when the program wants it."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hyperpod_ft.engines import sanity
from hyperpod_ft.engines.ranks import flags, stop_signal
from hyperpod_ft.engines.torch import devices


@dataclass(frozen=True)
class Step:
    """The outcome of an optimizer step, equal on all ranks."""

    number: int
    loss: float  # mean over the step's label tokens, or pairs
    grad_norm: float  # global, before clipping
    learning_rate: float
    stop_signal: int  # 0: no rank received one
    metrics: dict[str, float]  # the objective's


class LaunchedStep:
    """An optimizer step whose outcome the device may still be computing. Collective.

    One all-reduce of a few numbers over all ranks gives it: loss, squared gradient norm, whether a signal arrived.
    """

    def __init__(
        self, number: int, learning_rate: float, means: torch.Tensor, share_of_norm: torch.Tensor, signals: list[int]
    ) -> None:
        """`means` and `share_of_norm`: fp32 [1 + metrics] and [], which the ranks add up to the loss, the objective's
        metrics and the squared norm."""
        self.number, self._learning_rate, self._count = number, learning_rate, len(means)
        asked = devices.copied_to(means.device, torch.tensor(flags(signals)))
        self._summary = torch.cat([means, share_of_norm[None], asked])
        dist.all_reduce(self._summary)
        self._host = devices.HostCopy(self._summary)

    @property
    def grad_norm(self) -> torch.Tensor:
        """The norm of all gradients, before clipping: fp32 [], on the device."""
        return self._summary[self._count].sqrt()

    def read(self, metrics: tuple[str, ...]) -> Step:
        """Wait for the outcome; `metrics`: the names of the objective's.

        Raises UserError, on every rank, when loss or gradients are not finite.
        """
        numbers = self._host.wait().tolist()
        mean_loss, *others = numbers[: self._count]
        squared_norm, *asked = numbers[self._count :]
        norm = math.sqrt(squared_norm) if squared_norm >= 0 else math.nan
        sanity.check_finite(self.number, mean_loss, norm)
        named = dict(zip(metrics, others, strict=True))
        return Step(self.number, mean_loss, norm, self._learning_rate, stop_signal(asked), named)
