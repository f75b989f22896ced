"""The pipeline of a training step, by torch.distributed.pipelining: micro batches pass through the stages of all ranks.

Each micro batch is one of the step's `gradient_accumulation_steps`. Its tokens are read on every rank; hidden states
travel forward, and their gradients back. The losses are divided by the label tokens of the whole step, so that loss and
gradients are those of a model in one piece.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from hyperpod_ft import heartbeat
from hyperpod_ft.engines.interface import TrainingTask
from hyperpod_ft.engines.torch import devices
from hyperpod_ft.engines.torch.build import ShardedModel
from hyperpod_ft.engines.torch.mesh import Meshes
from hyperpod_ft.errors import UserError

Inputs = Mapping[str, torch.Tensor]
"""Of one micro batch, as `language_model.inputs` makes them."""


class Pipeline:
    """This rank's stages of a pipeline. The ranks of axis `pp` call its methods together."""

    def __init__(
        self, task: TrainingTask, meshes: Meshes, device: torch.device, model: ShardedModel, tokens: int
    ) -> None:
        """The module of `model` computes a stage at a time (model/stages.py). `tokens`: of a row on this rank.

        The trained weights are told of each backward pass, and whether it is the last of the step on this rank.
        """
        training, ranks = task.config.training, meshes.weights["pp"]
        self._module, self._stages, self._group = model.module, model.pipeline_stages, ranks.get_group()
        self._previous_rank, self._next_rank = ((ranks.get_local_rank() + step) % ranks.size() for step in (-1, 1))
        # like the hidden states of a micro batch
        shape, dtype = (training.micro_batch_size, tokens, model.module.config.hidden_size), training.precision
        self._hidden = torch.empty(shape, dtype=devices.DTYPES[dtype], device=device)
        self._before_backward = model.trained_weights.before_backward
        self._micro_batches = training.gradient_accumulation_steps
        self._inputs: Sequence[Inputs] = ()
        self._label_tokens = 1
        self._backward_passes = 0
        # NCCL makes the group's communicator in the first collective, in which all its ranks must take part
        dist.all_reduce(torch.zeros(1, device=device), group=self._group)
        parts: list[Any] = [self._scheduled_stage(place) for place in range(len(self._stages))]
        options: dict[str, Any] = {"loss_fn": lambda loss, _: loss, "scale_grads": False}
        schedule = task.config.parallelism.pipeline_schedule
        if schedule == "interleaved":
            self._schedule: Any = ScheduleInterleaved1F1B(parts, self._micro_batches, **options)
        else:
            kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule]
            self._schedule = kind(parts[0], self._micro_batches, **options)

    def forward_backward(self, micro_batches: Sequence[Inputs], label_tokens: int) -> torch.Tensor:
        """Compute the gradients of a step whose rows have that many label tokens on all ranks.

        Returns the part of the mean loss that is of this rank's tokens, fp32 [1]; 0 on ranks without the last stage.
        """
        self._inputs, self._label_tokens, self._backward_passes = micro_batches, label_tokens, 0
        numbers = torch.arange(len(micro_batches))  # on the CPU: reading one does not wait for the device
        losses: list[torch.Tensor] = []
        try:
            self._schedule.step(number=numbers, target=numbers, losses=losses, return_outputs=False)
        except RuntimeError as error:  # torch wraps what a stage raises
            if isinstance(error.__cause__, UserError):
                raise error.__cause__ from error
            raise
        self._inputs = ()
        return torch.stack([loss.detach() for loss in losses]).sum(0, keepdim=True) if losses else self._no_loss()[None]

    @torch.no_grad()
    def sums(self, inputs: Inputs) -> torch.Tensor:
        """The cross entropy of a batch summed over its label tokens, fp32 [1]; 0 on ranks without the last stage."""
        for place, stage in enumerate(self._stages):
            received = None
            if not stage.first:
                received = torch.empty_like(self._hidden)
                dist.recv(received, group=self._group, group_src=self._previous_rank)
            result: torch.Tensor = self._module(stage=place, hidden=received, **inputs)
            if stage.last:
                return result[None]
            dist.send(result.contiguous(), group=self._group, group_dst=self._next_rank)
        return self._no_loss()[None]

    def _no_loss(self) -> torch.Tensor:
        return torch.zeros((), device=self._hidden.device)

    def _scheduled_stage(self, place: int) -> PipelineStage:
        stage = self._stages[place]
        hidden = self._hidden.detach().requires_grad_()
        return ScheduledStage(
            _StageModule(self._compute, place),
            stage.index,
            stage.count,
            hidden.device,
            input_args=() if stage.first else hidden,
            output_args=self._no_loss().requires_grad_() if stage.last else hidden,
            group=self._group,
            before_backward=self._on_backward,
        )

    def _compute(self, place: int, hidden: torch.Tensor | None, number: int) -> torch.Tensor:
        result: torch.Tensor = self._module(stage=place, hidden=hidden, **self._inputs[number])
        return result / self._label_tokens if self._stages[place].last else result

    def _on_backward(self) -> None:
        heartbeat.beat()
        self._backward_passes += 1
        self._before_backward(self._backward_passes == len(self._stages) * self._micro_batches)


class _StageModule(nn.Module):
    """What a schedule calls for a micro batch. It has no parameters that torch's schedules could see.

    They would let an FSDP module keep whole gradients until the last micro batch. Here FSDP reduces them after each, as
    without a pipeline.
    """

    def __init__(self, compute: Callable[[int, torch.Tensor | None, int], torch.Tensor], place: int) -> None:
        super().__init__()
        self._compute, self._place = compute, place

    def forward(self, hidden: torch.Tensor | None = None, *, number: torch.Tensor) -> torch.Tensor:
        return self._compute(self._place, hidden, int(number))


class ScheduledStage(PipelineStage):
    """Says when a backward pass begins."""

    def __init__(self, *args: Any, before_backward: Callable[[], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._before_backward = before_backward

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        self._before_backward()
        super().backward_one_chunk(*args, **kwargs)
