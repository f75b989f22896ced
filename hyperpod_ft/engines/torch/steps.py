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
    expert_counts: torch.Tensor  # the tokens of each of a mixture's experts, fp32 [experts of all layers], on the CPU


class LaunchedStep:
    """An optimizer step whose outcome the device may still be computing. Collective.

    One all-reduce of a few numbers over all ranks gives it: loss, squared gradient norm, whether a signal arrived, and
    the tokens of each expert of a mixture.
    """

    def __init__(
        self,
        number: int,
        learning_rate: float,
        means: torch.Tensor,
        share_of_norm: torch.Tensor,
        signals: list[int],
        expert_counts: torch.Tensor,
    ) -> None:
        """`means` and `share_of_norm`: fp32 [1 + metrics] and [], which the ranks add up to the loss, the objective's
        metrics and the squared norm; `expert_counts`: fp32 [experts of all layers], which they add up too."""
        self.number, self._learning_rate = number, learning_rate
        asked = devices.copied_to(means.device, torch.tensor(flags(signals)))
        parts = [means, share_of_norm[None], asked, expert_counts]
        self._lengths = [len(part) for part in parts]
        self._summary = torch.cat(parts)
        dist.all_reduce(self._summary)
        self._host = devices.HostCopy(self._summary)

    @property
    def grad_norm(self) -> torch.Tensor:
        """The norm of all gradients, before clipping: fp32 [], on the device."""
        return self._summary[self._lengths[0]].sqrt()

    def read(self, metrics: tuple[str, ...]) -> Step:
        """Wait for the outcome; `metrics`: the names of the objective's.

        Raises UserError, on every rank, when loss or gradients are not finite.
        """
        means, share_of_norm, asked, expert_counts = self._host.wait().split(self._lengths)
        mean_loss, *others = means.tolist()
        squared_norm = share_of_norm.item()
        norm = math.sqrt(squared_norm) if squared_norm >= 0 else math.nan
        sanity.check_finite(self.number, mean_loss, norm)
        named = dict(zip(metrics, others, strict=True))
        return Step(
            self.number, mean_loss, norm, self._learning_rate, stop_signal(asked.tolist()), named, expert_counts
        )
