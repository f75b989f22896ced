"""Engine torch: native PyTorch on a `dp x tp` device mesh, the same code on every device.

One optimizer step: forward and backward over the rank's micro batches; partial gradients summed over tp (FSDP2 has
reduced them over dp); one all-reduce of a few numbers over all ranks (loss, squared gradient norm, whether a
signal arrived); clip; AdamW. Shapes never change, so a compiler sees one graph.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from hyperpod_ft.checkpoint.formats.model_directory import read_config
from hyperpod_ft.data.packing import IGNORED
from hyperpod_ft.engines import checkpoint_directory, metrics, sanity
from hyperpod_ft.engines.batches import DataOrder, TrainingRows
from hyperpod_ft.engines.checkpoint_directory import Progress
from hyperpod_ft.engines.interface import Trained
from hyperpod_ft.engines.interruption import SIGNALS, Interrupted, collect_signals
from hyperpod_ft.engines.processes import Processes, peak_memory_mb
from hyperpod_ft.engines.throughput import throughput
from hyperpod_ft.engines.torch import checkpoints, optimizer
from hyperpod_ft.engines.torch.lora import adapters
from hyperpod_ft.engines.torch.mesh import device_mesh, device_of
from hyperpod_ft.engines.torch.model import ShardedModel, build
from hyperpod_ft.engines.torch.tensor_parallel import check_replicas, sum_partial_gradients
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.schedule import learning_rate, total_steps
from hyperpod_ft.runs.run import Run


def train(run: Run, processes: Processes) -> Trained:
    """Train to the last step; see `hyperpod_ft.engines.interface.Engine`."""
    device = device_of(run.config.cluster.instance_type, processes.local_rank)
    with device_mesh(device, processes, run.plan.degrees) as mesh:
        return TrainingLoop(run, processes, device, mesh).run_to_end()


@dataclass(frozen=True)
class Step:
    """The outcome of an optimizer step, equal on all ranks."""

    number: int
    loss: float  # mean over the step's label tokens
    grad_norm: float  # global, before clipping
    learning_rate: float
    stop_signal: int  # 0: no rank received one


class TrainingLoop:
    """The training of a run on one rank, from its newest checkpoint to the end or to a signal."""

    def __init__(self, run: Run, processes: Processes, device: torch.device, mesh: DeviceMesh) -> None:
        self.run, self.processes, self.device, self.mesh = run, processes, device, mesh
        self.config = run.config.training
        self.tensor_parallel = mesh["tp"].size()
        self.data_parallel_rank = mesh.get_local_rank("dp")
        self.rows = TrainingRows(run.dataset / "train")
        self.order = DataOrder(
            rows=len(self.rows),
            seed=run.config.seed,
            micro_batch_size=self.config.micro_batch_size,
            gradient_accumulation_steps=self.config.gradient_accumulation_steps,
            data_parallel=mesh["dp"].size(),
        )
        self.steps = total_steps(self.config, len(self.rows), self.order.rows_per_step)
        self.model: ShardedModel = build(run, mesh)
        self.throughput = throughput(
            run, self.order.rows_per_step, self.rows.max_length, self.model.trainable_parameters
        )
        self.vocabulary = read_config(run.base_model).get("vocab_size")
        rate_factor = partial(adapters.learning_rate_factor, lora=run.config.lora)
        self.optimizer = optimizer.ShardedAdamW(self.model.trainable, self.config, rate_factor)
        # ranks of one tp group share the dropout masks of what is whole on each; every dp rank has its own
        torch.manual_seed(run.config.seed + 1 + self.data_parallel_rank)

    def run_to_end(self) -> Trained:
        """Train the remaining steps.

        Raises Interrupted after a signal, UserError when training cannot continue from the loss.
        """
        progress = self._resume()
        log = metrics.MetricsLog(
            self.run, self.throughput, self.order.rows, self.steps, progress, lambda: peak_memory_mb(self.device)
        )
        if self.processes.leads:
            log.open()
            self._announce(progress)
        with collect_signals() as signals:
            while progress.step < self.steps:
                step = self.step(progress.step + 1, signals)
                progress = log.advance(progress, step.loss)
                if self.processes.leads:
                    log.write(progress, step.learning_rate, step.grad_norm)
                sanity.check(self.config, progress, self.steps, self.vocabulary)
                last = step.number == self.steps
                if last or step.stop_signal or step.number % self.config.save_every_steps == 0:
                    self._save(progress)
                if step.stop_signal and not last:
                    raise Interrupted(step.number, step.stop_signal)
        return Trained(self.run.checkpoint(self.steps), self._facts(progress))

    def step(self, number: int, signals: list[int]) -> Step:
        """One optimizer step (from 1). Raises UserError, on every rank, when loss or gradients are not finite."""
        trainable = self.model.trainable.values()
        loss = self.forward_backward(number)
        summary = torch.stack(
            [
                # equal on the ranks of a tp group, so each contributes its share
                loss / self.tensor_parallel,
                optimizer.squared_norm(trainable, self.tensor_parallel),
                *torch.tensor([float(known in signals) for known in SIGNALS], device=self.device),
            ]
        )
        dist.all_reduce(summary)
        mean_loss, squared_norm, *asked = summary.tolist()
        norm = math.sqrt(squared_norm) if squared_norm >= 0 else math.nan
        if not (math.isfinite(mean_loss) and math.isfinite(norm)):
            raise UserError(
                f"step {number}: the loss is {mean_loss} and the gradient norm {norm}; nothing was saved",
                "lower training.learning_rate, or check the rows of this step",
            )
        optimizer.clip(trainable, norm, self.config.max_grad_norm)
        rate = learning_rate(self.config, number, self.steps)
        self.optimizer.step(rate)
        stop = max((known for known, ranks in zip(SIGNALS, asked, strict=True) if ranks), default=0)
        return Step(number, mean_loss, norm, rate, int(stop))

    def forward_backward(self, number: int) -> torch.Tensor:
        """Compute the gradients of step `number`'s mean loss into `.grad`; return this dp rank's share, fp32 []."""
        tokens = self.rows.label_tokens(self.order.step(number))
        if not tokens:
            raise UserError(
                f"step {number}: its rows have no token that counts in the loss", "check dataset.loss_on and the data"
            )
        micro_batches = self.order.micro_batches(number, self.data_parallel_rank)
        total = torch.zeros((), device=self.device)
        for index, rows in enumerate(micro_batches):
            self.model.exchange_gradients(index == len(micro_batches) - 1)
            # divided by the tokens of the whole step, so that sums over micro batches and ranks are its mean
            loss = self._loss(rows) / tokens
            loss.backward()
            total += loss.detach()
        sum_partial_gradients(self.model.partial, self.mesh.get_group("tp"))
        return total

    def _loss(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """Cross entropy summed over the label tokens of these rows, fp32 []."""
        batch = self.rows.batch(rows, self.device)
        # no attention mask: transformers derives one from position_ids that keeps packed documents apart
        logits = self.model.module(
            input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=None, use_cache=False
        ).logits
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1),
            batch.labels[:, 1:].flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )

    def _save(self, progress: Progress) -> None:
        check_replicas(self.model.trainable, self.mesh.get_group("tp"), progress.step)
        checkpoints.save(self.run, self._state(), progress, self.processes)

    def _state(self) -> dict[str, Any]:
        """The tensors of a checkpoint, sharing memory with model and optimizer."""
        return {
            "model": {name: parameter.detach() for name, parameter in self.model.trainable.items()},
            "optimizer": self.optimizer.state(),
            "random": checkpoints.random_state(self.processes.rank, self.device),
        }

    def _resume(self) -> Progress:
        """Load the newest complete checkpoint; without one, start at step 0."""
        if self.processes.leads:
            checkpoint_directory.remove_leftovers(self.run)
        progress = checkpoint_directory.newest(self.run, self.processes)
        if progress is None:
            return Progress()
        state = self._state()
        checkpoints.load(self.run.checkpoint(progress.step), state)
        self.optimizer.set_steps(progress.step)
        checkpoints.restore_random_state(state["random"], self.processes.rank, self.device)
        if progress.step == self.steps:
            return progress
        return replace(progress, resumed_from=(*progress.resumed_from, progress.step))

    def _announce(self, progress: Progress) -> None:
        degrees, order = self.run.plan.degrees, self.order
        print(
            f"train: {self.config.method} of {self.model.trainable_parameters:,} of"
            f" {self.model.total_parameters:,} parameters in {self.config.precision} on {degrees.world_size} ranks"
            f" (dp {degrees.data_parallel} x tp {degrees.tensor_parallel}, {self.device.type});"
            f" {self.steps} steps of {order.rows_per_step} rows x {self.rows.max_length} tokens, {order.rows} rows",
            flush=True,
        )
        if progress.step:
            print(f"train: resuming from step {progress.step}", flush=True)

    def _facts(self, progress: Progress) -> dict[str, Any]:
        degrees = self.run.plan.degrees
        return metrics.facts(self.run, self.throughput, self.order.rows, progress) | {
            "trainable_parameters": self.model.trainable_parameters,
            "total_parameters": self.model.total_parameters,
            "world_size": degrees.world_size,
            "dp": degrees.data_parallel,
            "tp": degrees.tensor_parallel,
        }
