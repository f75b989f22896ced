"""Engine neuron: optimum-neuron's trainer on PyTorch/XLA, with tensor, pipeline and data parallelism.

The model, its division, adapters, optimizer and backward pass are the trainer's. The loop over the steps is the kit's:
the trainer's own cannot resume, trains on other rows after a restart, and weighs data-parallel ranks alike however many
tokens count in their rows. What all ranks have to know of a step is one all-reduce, read while the device works on the
next: the host traces one step ahead.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch_xla.core.xla_model as xm
from neuronx_distributed.parallel_layers import parallel_state
from numpy.typing import NDArray

from hyperpod_ft.engines import Trained, checkpoint_directory, neuron_checkpoint, neuron_trainer
from hyperpod_ft.engines.batches import DataOrder, Rows
from hyperpod_ft.engines.checkpoint_directory import Progress
from hyperpod_ft.engines.interruption import SIGNALS, Interrupted, asked_to_stop
from hyperpod_ft.engines.metrics import MetricsLog
from hyperpod_ft.engines.processes import Processes
from hyperpod_ft.errors import UserError
from hyperpod_ft.run import Run
from hyperpod_ft.schedule import learning_rate, total_steps


def train(run: Run, processes: Processes) -> Trained:
    """Train to the last step; see `hyperpod_ft.engines.Engine`."""
    return Attempt(run, processes).to_the_end()


@dataclass(frozen=True)
class Step:
    """What all ranks know after an optimizer step."""

    number: int
    loss: float  # mean over the step's label tokens
    grad_norm: float  # global, before clipping
    learning_rate: float
    stop_signal: int  # 0: nobody was asked to stop


@dataclass(frozen=True)
class _Sent:
    """A step that the device may still be working on: loss, gradient norm and signals, fp32."""

    number: int
    learning_rate: float
    summary: torch.Tensor


class Attempt:
    """One attempt at a run, on one rank: from the newest checkpoint to the end, or to a signal."""

    def __init__(self, run: Run, processes: Processes) -> None:
        self.run, self.processes = run, processes
        self.config, degrees = run.config.training, run.plan.degrees
        self.rows = Rows(run.dataset / "train")
        self.data_parallel = degrees.data_parallel
        rows_per_step = self.config.micro_batch_size * self.config.gradient_accumulation_steps * degrees.data_parallel
        self.steps = total_steps(self.config, len(self.rows), rows_per_step)
        self.trainer = neuron_trainer.build(run, self.steps)
        self.pipeline = degrees.pipeline_parallel > 1
        # a pipeline takes all rows of a step at once and divides them itself
        accumulated = 1 if self.pipeline else self.config.gradient_accumulation_steps
        self.order = DataOrder(
            rows=len(self.rows),
            seed=run.config.seed,
            micro_batch_size=rows_per_step // degrees.data_parallel // accumulated,
            gradient_accumulation_steps=accumulated,
            data_parallel=degrees.data_parallel,
        )
        self.trainable_parameters = self.trainer.get_num_trainable_parameters()
        self.device = xm.xla_device()
        self.data_parallel_rank = parallel_state.get_data_parallel_rank()
        self.checkpoints = neuron_checkpoint.Checkpoints(run, self.trainer, processes)
        # the ranks of one model share the dropout masks of what each holds whole
        seed = run.config.seed + 1 + self.data_parallel_rank
        torch.manual_seed(seed)
        xm.set_rng_state(seed)

    def to_the_end(self) -> Trained:
        """Train what is left. Raises Interrupted after a signal, UserError when the loss is no number."""
        progress = self._resume()
        log = MetricsLog(self.run, self.order.rows_per_step, self.rows, self.steps, progress, torch.device("cpu"))
        if self.processes.leads:
            log.open()
            self._announce(progress)
        sent: _Sent | None = None
        with asked_to_stop() as signals:
            for number in range(progress.step + 1, self.steps + 1):
                following = self._send(number, signals)
                known = [self._read(sent)] if sent else []
                sent = following
                last, stopped = number == self.steps, any(step.stop_signal for step in known)
                save = last or stopped or number % self.config.save_every_steps == 0
                if save:
                    known.append(self._read(sent))
                    sent = None
                for step in known:
                    progress = log.advance(progress, step.loss)
                    if self.processes.leads:
                        log.write(progress, step.learning_rate, step.grad_norm)
                if save:
                    self.checkpoints.save(progress)
                stop = max((step.stop_signal for step in known), default=0)
                if stop and save and not last:
                    self.checkpoints.finish()
                    raise Interrupted(number, stop)
        self.checkpoints.finish()
        return Trained(checkpoint_directory.directory_of(self.run, self.steps), self._facts(progress))

    def _send(self, number: int, signals: list[int]) -> _Sent:
        """Give the device all of step `number`."""
        optimizer = self.trainer.optimizer
        loss = self._forward_backward(number)
        rate = learning_rate(self.config, number, self.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        norm = optimizer.grad_norm
        summary = torch.stack(
            [
                # equal on the ranks of one model, but for a pipeline's: its last stage has it, the others have 0
                loss / (self.run.plan.degrees.tensor_parallel * self.data_parallel),
                (torch.zeros((), device=self.device) if norm is None else norm.detach().float().reshape(()))
                / self.processes.world_size,
                *torch.tensor([float(known in signals) for known in SIGNALS], device=self.device),
            ]
        )
        summary = xm.all_reduce(xm.REDUCE_SUM, summary)
        optimizer.zero_grad()
        xm.mark_step()
        return _Sent(number, rate, summary)

    def _forward_backward(self, number: int) -> torch.Tensor:
        """Leave the gradients of the step's mean loss; gives this rank's loss, fp32 [], whose mean over dp it is."""
        tokens = self.rows.label_tokens(self.order.step(number))
        if not tokens:
            raise UserError(
                f"step {number}: no token of its rows counts in the loss", "check dataset.loss_on and the data"
            )
        # gradients are averaged over dp: so are sums that each rank divides by its share of the step's tokens
        share = None if self.pipeline else torch.tensor(tokens / self.data_parallel, device=self.device)
        total = torch.zeros((), device=self.device)
        for rows in self.order.micro_batches(number, self.data_parallel_rank):
            xm.mark_step()
            loss = self.trainer.training_step(self.trainer.model, self._inputs(rows), num_items_in_batch=share)
            total += loss.detach().float()
        xm.mark_step()
        return total

    def _inputs(self, rows: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        batch = self.rows.batch(rows, torch.device("cpu") if self.pipeline else self.device)
        return {"input_ids": batch.input_ids, "labels": batch.labels}

    def _read(self, sent: _Sent) -> Step:
        """Wait for the step. Raises UserError, on every rank, when loss or gradients are not finite."""
        loss, norm, *asked = sent.summary.cpu().tolist()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise UserError(
                f"step {sent.number}: the loss is {loss} and the gradient norm {norm}; nothing was saved",
                "lower training.learning_rate, or look at the rows of this step",
            )
        stop = max((known for known, ranks in zip(SIGNALS, asked, strict=True) if ranks), default=0)
        return Step(sent.number, loss, norm, sent.learning_rate, int(stop))

    def _resume(self) -> Progress:
        progress = self.checkpoints.restore()
        if progress.step in (0, self.steps):
            return progress
        return replace(progress, resumed_from=(*progress.resumed_from, progress.step))

    def _announce(self, progress: Progress) -> None:
        degrees, order = self.run.plan.degrees, self.order
        print(
            f"train: {self.config.method} of {self.trainable_parameters:,} parameters"
            f" in {self.config.precision} on {degrees.world_size} ranks (dp {degrees.data_parallel}"
            f" x pp {degrees.pipeline_parallel} x tp {degrees.tensor_parallel}, neuron);"
            f" {self.steps} steps of {order.rows_per_step} rows x {self.rows.max_length} tokens, {order.rows} rows",
            flush=True,
        )
        if progress.step:
            print(f"train: going on from step {progress.step}", flush=True)

    def _facts(self, progress: Progress) -> dict[str, Any]:
        degrees = self.run.plan.degrees
        rows = progress.step * self.order.rows_per_step
        tokens = rows * self.rows.max_length
        return {
            "steps": progress.step,
            "epochs": round(rows / self.order.rows, 4),
            "first_loss": progress.first_loss,
            "final_loss": progress.last_loss,
            "trainable_parameters": self.trainable_parameters,
            "tokens": tokens,  # padding included
            "tokens_per_second": round(tokens / progress.seconds, 1) if progress.seconds else None,
            "seconds": round(progress.seconds, 3),  # in the training loop, over all attempts
            "resumed_from": list(progress.resumed_from),
            "world_size": degrees.world_size,
            "dp": degrees.data_parallel,
            "pp": degrees.pipeline_parallel,
            "tp": degrees.tensor_parallel,
        }
