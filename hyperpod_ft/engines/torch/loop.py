"""Engine torch: native PyTorch on a device mesh, the same code on every device.

One optimizer step: forward and backward over the rank's micro batches, which sums the gradients over the ranks; one
all-reduce of a few numbers over all ranks (loss, squared gradient norm, whether a signal arrived); clip; AdamW. Shapes
never change, so a compiler sees one graph.
"""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hyperpod_ft.checkpoint.formats.model_directory import read_config
from hyperpod_ft.engines import checkpoint_directory, metrics, sanity
from hyperpod_ft.engines.batches import Batch, DataOrder, PairedBatch, Prefetch
from hyperpod_ft.engines.checkpoint_directory import Progress
from hyperpod_ft.engines.interface import Trained
from hyperpod_ft.engines.interruption import Interrupted, collect_signals, flags, stop_signal
from hyperpod_ft.engines.processes import Processes, peak_memory_mb
from hyperpod_ft.engines.throughput import throughput
from hyperpod_ft.engines.torch import checkpoints, devices, reference
from hyperpod_ft.engines.torch.evaluation import evaluation_of
from hyperpod_ft.engines.torch.lora import adapters
from hyperpod_ft.engines.torch.mesh import Meshes, device_meshes, device_of
from hyperpod_ft.engines.torch.model import compiling, context_parallel
from hyperpod_ft.engines.torch.model.build import ShardedModel, build
from hyperpod_ft.engines.torch.objectives import objective_of
from hyperpod_ft.engines.torch.optimizer.adamw import AdamW
from hyperpod_ft.engines.torch.pipeline.pipeline import pipeline_of
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.encoder_decoder.t5_shape import t5_shape
from hyperpod_ft.planning.model_shape import model_shape
from hyperpod_ft.planning.torch import sharding_choice
from hyperpod_ft.planning.torch.sharding import Sharding
from hyperpod_ft.planning.training_steps import learning_rate, total_steps
from hyperpod_ft.runs.run import Run


def train(run: Run, processes: Processes) -> Trained:
    """Train to the last step; see `hyperpod_ft.engines.interface.Engine`."""
    with _training_loop(run, processes) as loop:
        return loop.run_to_end()


def precompile(run: Run, processes: Processes) -> dict[str, Any]:
    """Run a step and a batch of the evaluation; see `hyperpod_ft.engines.interface.Engine`.

    Shapes are constant, so one step compiles every graph.
    """
    with _training_loop(run, processes) as loop:
        loop.trial()
    return {"trial_steps": 1}


@contextlib.contextmanager
def _training_loop(run: Run, processes: Processes) -> Iterator["TrainingLoop"]:
    """The loop on this rank's device, while its process groups exist."""
    device = device_of(run.config.cluster.instance_type, processes.local_rank)
    sharding = sharding_of(run)
    with device_meshes(device, processes, run.plan.degrees, sharding.shard_ranks) as meshes:
        yield TrainingLoop(run, processes, device, meshes, sharding)


def sharding_of(run: Run) -> Sharding:
    """The sharding of a run whose base model is on disk."""
    config = read_config(run.base_model)
    return sharding_choice.choose_sharding(run.config, run.plan.degrees, model_shape(config) or t5_shape(config))


@dataclass(frozen=True)
class Step:
    """The outcome of an optimizer step, equal on all ranks."""

    number: int
    loss: float  # mean over the step's label tokens, or pairs
    grad_norm: float  # global, before clipping
    learning_rate: float
    stop_signal: int  # 0: no rank received one
    metrics: dict[str, float]  # the objective's


class TrainingLoop:
    """The training of a run on one rank, from its newest checkpoint to the end or to a signal."""

    def __init__(
        self, run: Run, processes: Processes, device: torch.device, meshes: Meshes, sharding: Sharding
    ) -> None:
        self.run, self.processes, self.device, self.meshes, self.sharding = run, processes, device, meshes, sharding
        self.config = run.config.training
        self.tensor_parallel = meshes.weights["tp"].size()
        self.data_parallel_rank = meshes.tokens.get_local_rank("dp")
        self.chunk = context_parallel.chunk_of(meshes.tokens["cp"])
        self.objective = objective_of(run.config, self.chunk)
        self.rows = self.objective.open(run.dataset_path / "train")
        self.order = DataOrder(
            rows=len(self.rows),
            seed=run.config.seed,
            micro_batch_size=self.config.micro_batch_size,
            gradient_accumulation_steps=self.config.gradient_accumulation_steps,
            data_parallel=meshes.tokens["dp"].size(),
        )
        self.batches = Prefetch(self._micro_batch)
        self.steps = total_steps(self.config, len(self.rows), self.order.rows_per_step)
        self.model: ShardedModel = build(run, meshes, sharding)
        self.trained_weights = self.model.trained_weights
        self.pipeline = pipeline_of(run, meshes, device, self.model, self.rows.max_length // self.chunk.count)
        self.throughput = throughput(
            run, self.order.rows_per_step, self.rows.max_length, self.model.trainable_parameters
        )
        self.vocabulary = read_config(run.base_model).get("vocab_size")
        rate_factor = partial(adapters.learning_rate_factor, lora=run.config.lora)
        self.optimizer = AdamW(self.trained_weights, self.config, rate_factor)
        self.evaluation = evaluation_of(run, self.objective, device, meshes)
        if self.config.objective == "dpo":
            wanted = {"train": (self.rows, self.order.first_rows(self.steps))}
            if self.evaluation:
                wanted["validation"] = (self.evaluation.split, np.arange(len(self.evaluation.split)))
            # the model is still the one that training begins with
            reference.add(run, processes, meshes, device, self.model.module, wanted)
        self.checkpoints = checkpoints.Checkpoints(run, processes, device)
        # tp ranks must draw the same dropout masks, since they hold the same activations, or parts of one tensor
        # (divided_dropout.py); dp, cp and pp ranks others
        token_group = self.data_parallel_rank * self.chunk.count + self.chunk.index
        stage_offset = meshes.weights.get_local_rank("pp") * run.plan.degrees.weight_replicas
        torch.manual_seed(run.config.seed + 1 + token_group + stage_offset)

    def run_to_end(self) -> Trained:
        """Train the remaining steps.

        Raises Interrupted after a signal, UserError when training cannot continue from the loss. Even then the
        checkpoint that a thread writes is finished.
        """
        try:
            return self._run_to_end()
        except UserError:
            with contextlib.suppress(UserError):  # the first error counts
                self.checkpoints.finish()
            raise

    def _run_to_end(self) -> Trained:
        progress = self.resume()
        evaluate_every = self.config.evaluate_every_steps
        log = metrics.MetricsLog(
            self.run, self.throughput, self.order.rows, self.steps, progress, lambda: peak_memory_mb(self.device)
        )
        if self.processes.leads:
            log.open()
            log.announce(
                f"{self.model.trainable_parameters:,} of {self.model.total_parameters:,}",
                f"{self.sharding}, {self.device.type}",
            )
        with collect_signals() as signals:
            if evaluate_every and progress.step == 0:
                progress = replace(progress, base_validation_loss=self._validate(log)[0])
            while progress.step < self.steps and not progress.stopped_early:
                step = self.step(progress.step + 1, signals)
                progress = log.advance(progress, step.loss, step.metrics)
                validation_loss, row_metrics = None, step.metrics
                if self.evaluation and (
                    step.number == self.steps or (evaluate_every and step.number % evaluate_every == 0)
                ):
                    validation_loss, validation_metrics = self._validate(log)
                    progress = progress.evaluated(
                        validation_loss, self.config.early_stopping_patience, validation_metrics
                    )
                    row_metrics = row_metrics | validation_metrics
                if self.processes.leads:
                    log.write(progress, step.learning_rate, step.grad_norm, validation_loss, row_metrics)
                sanity.check(self.config, progress, self.steps, self.vocabulary)
                last = step.number == self.steps or progress.stopped_early
                self.save(progress, last, wanted=last or bool(step.stop_signal))
                if step.stop_signal and not last:
                    self.checkpoints.finish()
                    raise Interrupted(step.number, step.stop_signal, saved=not self.config.save_only_model)
        self.checkpoints.finish()
        if progress.stopped_early and self.processes.leads:
            print(
                f"train: stopped after step {progress.step}: the validation loss was lowest,"
                f" {progress.best_validation_loss:.4f}, after step {progress.best_step}",
                flush=True,
            )
        best = self.config.keep_best
        if best and self.processes.leads:
            checkpoint_directory.check_best(self.run, progress.best_step)
        trained = self.run.best_checkpoint if best else self.run.checkpoint(progress.step)
        return Trained(trained, self._facts(progress))

    def trial(self) -> None:
        """The operations of training, once."""
        if self.evaluation:
            self._means(rows=1)
        self.step(1, [])

    def _validate(self, log: metrics.MetricsLog) -> tuple[float, dict[str, float]]:
        """The validation loss, and the objective's other metrics by name."""
        begun = time.monotonic()
        loss, *others = self._means()
        log.leave_out(time.monotonic() - begun)
        names = (f"validation_{name}" for name in self.objective.metrics)
        return loss, dict(zip(names, others, strict=True))

    def _means(self, rows: int | None = None) -> list[float]:
        assert self.evaluation is not None
        module = self.model.module
        sums = self.pipeline.sums if self.pipeline else partial(self.objective.sums, module)
        return self.evaluation.means(module, lambda batch: sums(self.inputs(batch)), rows)

    def step(self, number: int, signals: list[int]) -> Step:
        """One optimizer step (from 1). Raises UserError, on every rank, when loss or gradients are not finite."""
        means, share_of_norm = self.forward_backward(number)
        summary = torch.cat(
            [
                # equal on the ranks of a tp group, so each contributes its share
                means / self.tensor_parallel,
                share_of_norm[None],
                torch.tensor(flags(signals), device=self.device),
            ]
        )
        dist.all_reduce(summary)
        mean_loss, *others = summary[: len(means)].tolist()
        squared_norm, *asked = summary[len(means) :].tolist()
        norm = math.sqrt(squared_norm) if squared_norm >= 0 else math.nan
        sanity.check_finite(number, mean_loss, norm)
        rate = learning_rate(self.config, number, self.steps)
        self.optimizer.step(rate, norm)
        named = dict(zip(self.objective.metrics, others, strict=True))
        return Step(number, mean_loss, norm, rate, stop_signal(asked), named)

    def forward_backward(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the gradients of step `number`'s mean loss.

        Returns the part of the loss and of the objective's metrics that is of this rank's tokens, which in a pipeline
        the last stage has, fp32 [1 + metrics], and the rank's share of the squared gradient norm, fp32 [].
        """
        count = self.objective.count(self.rows, self.order.step(number), f"step {number}")
        last = self.config.gradient_accumulation_steps - 1
        if self.pipeline:
            micro_batches = [self._micro_batch((number, index)) for index in range(last + 1)]
            total = self.pipeline.forward_backward(micro_batches, count)
            return total, self.trained_weights.after_backward()
        total = torch.zeros(1 + len(self.objective.metrics), device=self.device)
        for index in range(last + 1):
            self.trained_weights.before_backward(last=index == last)
            # divided by the count of the whole step, so that sums over micro batches and ranks are its mean
            means = self.objective.sums(self.model.module, self.batches.take((number, index))) / count
            means[0].backward()
            total += means.detach()
            if index < last or number < self.steps:
                self.batches.prepare((number, index + 1) if index < last else (number + 1, 0))
        return total, self.trained_weights.after_backward()

    def _micro_batch(self, step_and_index: tuple[int, int]) -> dict[str, torch.Tensor]:
        step, index = step_and_index
        rows = self.order.micro_batches(step, self.data_parallel_rank)[index]
        return self.inputs(self.rows.batch(rows))

    def inputs(self, batch: Batch | PairedBatch) -> dict[str, torch.Tensor]:
        """The model's arguments for a batch, on the device."""
        return self.objective.inputs(batch, self.device, compiling.compiles(self.config, self.device))

    def save(self, progress: Progress, last: bool, wanted: bool) -> None:
        """Save what is due after this step; `wanted`: a checkpoint for a restart is, whatever its number."""
        config = self.config
        best = config.keep_best and progress.best_step == progress.step
        if config.save_only_model:
            due = last
        else:
            due = wanted or progress.step % config.save_every_steps == 0
        if best or due:
            self.trained_weights.check_replicas(progress.step)
        if best:
            self.checkpoints.save_best(self._weights(), progress)
        if due:
            self.checkpoints.save(self._weights() if config.save_only_model else self._state(), progress)

    def _weights(self) -> dict[str, Any]:
        """The trained weights in `weights_dtype`."""
        dtype = devices.DTYPES[self.config.weights_dtype]
        return {"model": self.trained_weights.state(dtype)}

    def _state(self) -> dict[str, Any]:
        """What a restart needs: the tensors of a checkpoint, sharing memory with model and optimizer."""
        return {
            "model": self.trained_weights.state(),
            "optimizer": self.optimizer.state(),
            "random": checkpoints.random_state(self.processes.rank, self.device),
        }

    def resume(self) -> Progress:
        """Load the newest complete checkpoint; without one, start at step 0."""
        if self.processes.leads:
            checkpoint_directory.remove_leftovers(self.run)
        progress = checkpoint_directory.newest(self.run, self.processes)
        if self.processes.leads:
            checkpoint_directory.discard_later_best(self.run, progress.step if progress else 0)
        if progress is None:
            return Progress()
        if progress.step == self.steps or progress.stopped_early:
            # nothing is left to train; it may hold the weights alone
            return progress
        state = self._state()
        self.checkpoints.load(self.run.checkpoint(progress.step), state)
        for names in self.trained_weights.buckets:
            self.trained_weights.use_masters(names)
        self.optimizer.steps = progress.step
        checkpoints.restore_random_state(state["random"], self.processes.rank, self.device)
        return replace(progress, resumed_from=(*progress.resumed_from, progress.step))

    def _facts(self, progress: Progress) -> dict[str, Any]:
        trained = self.model.trainable_parameters
        return metrics.facts(self.run, self.throughput, self.order.rows, progress, trained) | {
            "total_parameters": self.model.total_parameters,
            "sharding": str(self.sharding),
        }
