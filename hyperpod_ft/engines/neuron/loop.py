"""Engine neuron: optimum-neuron's trainer on PyTorch/XLA, with tensor, pipeline and data parallelism.

The trainer provides the sharded model, adapters, optimizer and backward pass. The loop over the steps is the kit's: the
trainer's own cannot resume, trains on different rows after a restart, and gives data-parallel ranks equal weight,
however many of their tokens count in the loss. (A pipeline still gives rows equal weight: upstream averages each row
separately.) Per step, ranks exchange their results in one all-reduce, which the host reads while the device works on
the next step: the host traces one step ahead.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch_xla.core.xla_model as xm
from neuronx_distributed.parallel_layers import parallel_state
from numpy.typing import NDArray

from hyperpod_ft import digests, heartbeat
from hyperpod_ft.checkpoint.formats.model_directory import read_config
from hyperpod_ft.config.sections.training import learning_rate, total_steps
from hyperpod_ft.engines import metrics, sanity
from hyperpod_ft.engines.batches import Batch, DataOrder, PackedSplit
from hyperpod_ft.engines.interface import TrainingProgress, TrainingResult, TrainingTask
from hyperpod_ft.engines.neuron import checkpoints, trainer
from hyperpod_ft.engines.neuron.gradients import sum_over_tensor_parallel
from hyperpod_ft.engines.ranks import Interrupted, Ranks, collect_signals, flags, peak_memory_mb, stop_signal
from hyperpod_ft.engines.throughput import throughput
from hyperpod_ft.errors import UserError

_LATE = 1e6


def train(task: TrainingTask, ranks: Ranks) -> TrainingResult:
    """Train to the last step; see `hyperpod_ft.engines.interface.Engine`."""
    return TrainingLoop(task, ranks).run_to_end()


def precompile(task: TrainingTask, ranks: Ranks) -> dict[str, Any]:
    """Trace the graphs of training; see `hyperpod_ft.engines.interface.Engine`."""
    training = TrainingLoop(task, ranks)
    steps = min(task.config.neuron.precompile_steps, training.total_steps)
    for number in range(1, steps + 1):
        training.send(number, [])
    # Late in a long training AdamW's bias corrections are exactly 1, which XLA compiles as a constant: another graph.
    for _, _, state in training.checkpoints.moments():
        state["step"].fill_(_LATE)
    training.send(steps, [])
    xm.wait_device_ops()
    return {"trial_steps": steps + 1}


@dataclass(frozen=True)
class _Sent:
    """A step that the device may still be working on: loss, gradient norm and signals, fp32."""

    number: int
    learning_rate: float
    summary: torch.Tensor


class TrainingLoop:
    """One attempt at a training, on one rank: from the newest checkpoint to the end, or to a signal."""

    def __init__(self, task: TrainingTask, ranks: Ranks) -> None:
        self.task, self.ranks = task, ranks
        self.config, degrees = task.config.training, task.layout.degrees
        self.rows = PackedSplit(task.dataset / "train")
        self.data_parallel = degrees.data_parallel
        of_step = task.config.rows_per_step(degrees.data_parallel)
        self.total_steps = total_steps(self.config, len(self.rows), of_step)
        self.trainer = trainer.build(task, self.total_steps)
        self.pipeline = degrees.pipeline_parallel > 1
        self.order = DataOrder(
            rows=len(self.rows),
            seed=task.config.seed,
            rows_per_step=of_step,
            # a pipeline takes all rows of a step at once and divides them itself
            micro_batches_per_step=1 if self.pipeline else self.config.gradient_accumulation_steps,
            data_parallel=degrees.data_parallel,
        )
        stage = parallel_state.get_pipeline_model_parallel_rank()
        held = dict(ranks.gather("trainable", (stage, self.trainer.trainable_here)))
        self.trainable_parameters = sum(held.values())
        self.throughput = throughput(task, of_step, self.rows.max_length, self.trainable_parameters)
        self.vocabulary = read_config(task.base_model).get("vocab_size")
        self.device = xm.xla_device()
        self.data_parallel_rank = parallel_state.get_data_parallel_rank()
        self.checkpoints = checkpoints.Checkpoints(task, self.trainer, ranks)
        self.progress = TrainingProgress()

    def run_to_end(self) -> TrainingResult:
        """Train the remaining steps.

        Raises Interrupted after a signal, UserError when training cannot continue from the loss.
        """
        self._resume()
        self.log = metrics.MetricsLog(
            self.task, self.throughput, self.order.rows, self.total_steps, self.progress, _peak_memory_mb
        )
        if self.ranks.is_rank_0:
            self.log.open()
            self.log.announce(f"{self.trainable_parameters:,}", "neuron")
        sent: _Sent | None = None
        stop = 0
        with collect_signals() as signals:
            for number in range(self.progress.step + 1, self.total_steps + 1):
                last = number == self.total_steps
                saves = bool(last or stop or number % self.config.save_every_steps == 0)
                if saves and sent:
                    # waited for now, not together with the step that is saved, so that each is timed separately
                    stop, sent = max(stop, self._take(sent)), None
                before, sent = sent, self.send(number, signals)
                if before:
                    stop = self._take(before)
                if saves:
                    stop, sent = max(stop, self._take(sent)), None
                    self.checkpoints.save(self.progress)
                    if stop and not last:
                        self.checkpoints.finish()
                        raise Interrupted(number, stop)
        self.checkpoints.finish()
        facts = self.log.facts(self.progress, self.trainable_parameters)
        return TrainingResult(self.task.checkpoint(self.total_steps), facts)

    def send(self, number: int, signals: list[int]) -> _Sent:
        """Send all of step `number` to the device, without waiting for it."""
        optimizer = self.trainer.optimizer
        self._seed(number)
        loss = self._forward_backward(number)
        sum_over_tensor_parallel(self.trainer.partial)
        rate = learning_rate(self.config, number, self.total_steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        summary = torch.stack(
            [
                # equal on the ranks of one model, except in a pipeline: its last stage has the loss, the others 0
                loss / (self.task.layout.degrees.tensor_parallel * self.data_parallel),
                optimizer.grad_norm.detach().float().reshape(()) / self.ranks.world_size,
                *torch.tensor(flags(signals), device=self.device),
            ]
        )
        summary = xm.all_reduce(xm.REDUCE_SUM, summary)
        optimizer.zero_grad()
        xm.mark_step()
        return _Sent(number, rate, summary)

    def _seed(self, number: int) -> None:
        """Seed the dropout of step `number` from the step alone, so that a restart needs no random state.

        The ranks of one model use the same seed: masks of replicated activations must be the same.
        """
        text = f"{self.task.config.seed} {number} {self.data_parallel_rank}"
        seed = int(digests.text_sha256(text)[:12], 16)
        torch.manual_seed(seed)
        xm.set_rng_state(seed)

    def _forward_backward(self, number: int) -> torch.Tensor:
        """Compute the gradients of the step's mean loss.

        Returns this rank's loss, fp32 []; its mean over dp is the step's.
        """
        rows_of_step = self.order.step(number)
        tokens = self.rows.label_tokens(rows_of_step)
        # a pipeline averages each row separately
        if not tokens or (
            self.pipeline and not all(self.rows.label_tokens(rows_of_step[[i]]) for i in range(rows_of_step.size))
        ):
            raise UserError(
                f"step {number}: {'a row has' if tokens else 'its rows have'} no token that counts in the loss",
                "check dataset.loss_on and the data",
            )
        # gradients are averaged over dp, so each rank divides its sums by the step's tokens / dp
        share = None if self.pipeline else torch.tensor(tokens / self.data_parallel, device=self.device)
        total = torch.zeros((), device=self.device)
        for rows in self.order.micro_batches(number, self.data_parallel_rank):
            heartbeat.beat()
            xm.mark_step()
            loss = self.trainer.training_step(self.trainer.model, self._inputs(rows), num_items_in_batch=share)
            total += loss.detach().float()
        xm.mark_step()
        return total

    def _inputs(self, rows: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        batch = self.rows.batch(rows)
        assert isinstance(batch, Batch)  # the engine's limits refuse encoder-decoders
        device = torch.device("cpu") if self.pipeline else self.device
        inputs = {"input_ids": batch.input_ids.to(device), "labels": batch.labels.to(device)}
        if self.pipeline:
            # it was traced with one; the rows are full, and the model applies the causal mask itself
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        return inputs

    def _take(self, sent: _Sent) -> int:
        """Wait for the step and log it. Returns the signal that a rank received; 0: none.

        Raises UserError, on every rank, when loss or gradients are not finite, or training diverges.
        """
        loss, norm, *asked = sent.summary.cpu().tolist()
        sanity.check_finite(sent.number, loss, norm)
        self.progress = self.log.advance(self.progress, loss)
        if self.ranks.is_rank_0:
            self.log.write(self.progress, sent.learning_rate, norm)
        sanity.check(self.config, self.progress, self.total_steps, self.vocabulary)
        return stop_signal(asked)

    def _resume(self) -> None:
        """Load the newest complete checkpoint; without one, start at step 0."""
        self.progress = self.checkpoints.restore()
        if 0 < self.progress.step < self.total_steps:
            self.progress = replace(self.progress, resumed_from=(*self.progress.resumed_from, self.progress.step))


def _peak_memory_mb() -> float:
    """Peak memory of this process on the host: XLA reports current use only, not the peak."""
    return peak_memory_mb(torch.device("cpu"))
