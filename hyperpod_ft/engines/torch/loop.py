"""Engine torch: native PyTorch on a device mesh, the same code on every device.

One optimizer step: forward and backward over the rank's micro batches, which sums the gradients over the ranks; one
all-reduce of a few numbers over all ranks (steps.py); clip; AdamW. Shapes never change, so a compiler sees one graph.
"""

import contextlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from hyperpod_ft import heartbeat
from hyperpod_ft.checkpoint.formats.model_directory import of_language_model, read_config
from hyperpod_ft.config.sections.training import learning_rate, total_steps
from hyperpod_ft.engines import checkpoint_directory, metrics, sanity
from hyperpod_ft.engines.batches import Batch, DataOrder, PreferenceSplit, Seq2SeqBatch
from hyperpod_ft.engines.interface import TrainingProgress, TrainingResult, TrainingTask
from hyperpod_ft.engines.ranks import Interrupted, Ranks, collect_signals, device_of, peak_memory_mb
from hyperpod_ft.engines.throughput import throughput
from hyperpod_ft.engines.torch import devices
from hyperpod_ft.engines.torch.build import ShardedModel, build
from hyperpod_ft.engines.torch.lora import adapters
from hyperpod_ft.engines.torch.mesh import Meshes, device_meshes
from hyperpod_ft.engines.torch.model import context_parallel, router_loss
from hyperpod_ft.engines.torch.node_memory import node_memory
from hyperpod_ft.engines.torch.objectives import reference
from hyperpod_ft.engines.torch.objectives.objective import objective_of
from hyperpod_ft.engines.torch.objectives.validation import Means, validation_of
from hyperpod_ft.engines.torch.objectives.validation_rouge import ValidationRouge
from hyperpod_ft.engines.torch.optimizer.adamw import AdamW
from hyperpod_ft.engines.torch.pipeline import Pipeline
from hyperpod_ft.engines.torch.steps import LaunchedStep, Step
from hyperpod_ft.engines.torch.training_state import TrainingState
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.results import expert_load
from hyperpod_ft.runs.results.metrics import OF_SOURCE, ROUGE


def train(task: TrainingTask, ranks: Ranks) -> TrainingResult:
    """Train to the last step; see `hyperpod_ft.engines.interface.Engine`."""
    with node_memory(task.memory, ranks) as memory, training_loop(replace(task, memory=memory), ranks) as loop:
        return loop.run_to_end()


def precompile(task: TrainingTask, ranks: Ranks) -> dict[str, Any]:
    """Run a step and a batch of the validation; see `hyperpod_ft.engines.interface.Engine`.

    Shapes are constant, so one step compiles every graph.
    """
    with training_loop(task, ranks) as loop:
        loop.trial()
    return {"trial_steps": 1}


@contextlib.contextmanager
def training_loop(task: TrainingTask, ranks: Ranks) -> Iterator["TrainingLoop"]:
    """The loop on this rank's device, while its process groups exist."""
    device = device_of(task.config.cluster.instance_type, ranks.local_rank)
    with device_meshes(device, ranks, task.layout.degrees, task.layout.sharding.shard_ranks) as meshes:
        loop = TrainingLoop(task, ranks, device, meshes)
        loop.add_reference()
        yield loop


class TrainingLoop:
    """A training on one rank, from its newest checkpoint to the end or to a signal."""

    def __init__(self, task: TrainingTask, ranks: Ranks, device: torch.device, meshes: Meshes) -> None:
        self.task, self.ranks, self.device, self.meshes = task, ranks, device, meshes
        self.config = task.config.training
        self.tensor_parallel = meshes.weights["tp"].size()
        self.data_parallel_rank = meshes.tokens.get_local_rank("dp")
        self.chunk = context_parallel.chunk_of(meshes.tokens["cp"])
        self.objective = objective_of(task.config, self.chunk)
        self.rows = self.objective.open(task.dataset / "train")
        data_parallel = meshes.tokens["dp"].size()
        self.order = DataOrder(
            rows=len(self.rows),
            seed=task.config.seed,
            rows_per_step=task.config.rows_per_step(data_parallel),
            micro_batches_per_step=self.config.gradient_accumulation_steps,
            data_parallel=data_parallel,
        )
        # the inputs of a micro batch of a step, made while an accelerator still computes with those before
        self.made_ahead: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        self.total_steps = total_steps(self.config, len(self.rows), self.order.rows_per_step)
        self.model: ShardedModel = build(task, meshes)
        self.trained_weights = self.model.trained_weights
        # of each step, by the names in metrics.jsonl
        self.metrics = self.objective.metrics + ((router_loss.NAME,) if self.model.router_loss else ())
        self.pipeline = None
        if meshes.weights["pp"].size() > 1:
            self.pipeline = Pipeline(task, meshes, device, self.model, self.rows.max_length // self.chunk.count)
        self.throughput = throughput(
            task, self.order.rows_per_step, self.rows.max_length, self.model.trainable_parameters
        )
        self.vocabulary = of_language_model(read_config(task.base_model)).get("vocab_size")
        rate_factor = partial(adapters.learning_rate_factor, lora=task.config.lora)
        self.notes_graphs = ranks.is_rank_0 and devices.compiles(self.config, device)
        # the first rank of each pipeline stage
        self.notes_left = not any(map(meshes.weights.get_local_rank, ("dp_replicate", "dp_shard", "tp")))
        self.left_to_host = devices.LeftToHost()
        self.steps_ahead = int(devices.is_asynchronous(device))  # of the one whose outcome is read
        if task.layout.sharding.offload != "none" and device.type != "cpu":
            # the update is computed here; scripts give a rank one thread, for ranks that compute on the same CPUs
            torch.set_num_threads(devices.host_threads(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        self.optimizer = AdamW(self.trained_weights, self.config, rate_factor)
        self.validation = validation_of(task, self.objective, device, meshes)
        samples = self.config.validate_rouge_rows
        self.rouge = ValidationRouge(task, ranks, samples) if samples else None
        self.state = TrainingState(task, ranks, device, self.trained_weights, self.optimizer)
        # tp ranks hold the same activations and must draw the same dropout masks (or parts of one:
        # tensor_collectives.py); dp, cp and pp ranks draw their own
        token_group = self.data_parallel_rank * self.chunk.count + self.chunk.index
        stage_offset = meshes.weights.get_local_rank("pp") * task.layout.degrees.weight_replicas
        torch.manual_seed(task.config.seed + 1 + token_group + stage_offset)

    def add_reference(self) -> None:
        """Compute the reference log-probabilities of preferences (objective dpo); other objectives need none.

        To be called before the first step, and before a checkpoint is loaded. Collective.
        """
        if not isinstance(self.rows, PreferenceSplit):
            return
        wanted = {"train": (self.rows, self.order.first_rows(self.total_steps))}
        if self.validation and isinstance(self.validation.split, PreferenceSplit):
            wanted["validation"] = (self.validation.split, np.arange(len(self.validation.split)))
        reference.add(self.task, self.ranks, self.meshes, self.device, self.model.module, wanted)

    def run_to_end(self) -> TrainingResult:
        """Train the remaining steps.

        Raises Interrupted after a signal, UserError when training cannot continue from the loss. Even then the
        checkpoint that a thread writes is finished.
        """
        try:
            return self._run_to_end()
        except UserError:
            with contextlib.suppress(UserError):  # the first error counts
                self.state.finish()
            raise

    def _run_to_end(self) -> TrainingResult:
        progress = self.state.resume(self.total_steps)
        validate_every = self.config.validate_every_steps
        log = metrics.MetricsLog(
            self.task, self.throughput, self.order.rows, self.total_steps, progress, lambda: peak_memory_mb(self.device)
        )
        if self.ranks.is_rank_0:
            log.open()
            log.announce(
                f"{self.model.trainable_parameters:,} of {self.model.total_parameters:,}",
                f"{self.task.layout.sharding}, {self.device.type}",
            )
        with collect_signals() as signals:
            if validate_every and progress.step == 0:
                loss, measured = self._validate(log, 0)
                names = (name for name in measured if name.startswith(OF_SOURCE) or name in ROUGE)
                of_base = {f"base_{name}": measured[name] for name in names}
                progress = replace(progress, base_validation_loss=loss, metrics={**progress.metrics, **of_base})
            launched: deque[LaunchedStep] = deque()
            stopping = False
            while progress.step < self.total_steps and not progress.stopped_early:
                waiting = len(launched)
                while self._may_launch(launched, stopping):
                    launched.append(self.launch(launched[-1].number + 1 if launched else progress.step + 1, signals))
                nothing_launched = len(launched) == waiting
                step = launched.popleft().read(self.metrics)
                stopping = stopping or bool(step.stop_signal)
                progress = self._after(step, progress, log, nothing_launched)
                last = step.number == self.total_steps or progress.stopped_early
                leaving = stopping and not launched
                self.state.save(progress, last, wanted=last or leaving)
                if leaving and not last:
                    self.state.finish()
                    raise Interrupted(step.number, step.stop_signal, saved=not self.config.save_only_model)
            self.state.finish()
        return self._trained(progress, log)

    def _after(
        self, step: Step, progress: TrainingProgress, log: metrics.MetricsLog, nothing_launched: bool
    ) -> TrainingProgress:
        """Validate if it is due, write the step's row, and check its loss. Returns the progress that includes it."""
        loads = self.model.expert_counts.loads(step.expert_counts)
        row_metrics = step.metrics | expert_load.metrics(loads)
        progress = log.advance(progress, step.loss, row_metrics, loads)
        validation_loss = None
        if self.validation and self._validates_after(step.number):
            validation_loss, validation_metrics = self._validate(log, step.number)
            progress = progress.validated(validation_loss, self.config.early_stopping_patience, validation_metrics)
            row_metrics = row_metrics | validation_metrics
        if self.ranks.is_rank_0:
            log.write(
                progress,
                step.learning_rate,
                step.grad_norm,
                validation_loss,
                row_metrics,
                nothing_launched=nothing_launched,
            )
        if self.notes_graphs and devices.compiles_no_more():
            self.notes_graphs = False
            print(f"train: a layer has had {devices.GRAPHS} graphs: what is new runs uncompiled, slower", flush=True)
        self._note_left(step.number)
        sanity.check(self.config, progress, self.total_steps, self.vocabulary)
        return progress

    def _note_left(self, number: int) -> None:
        if self.notes_left and (new := self.left_to_host.new()):
            who = f"rank {self.ranks.rank}'s device"
            print(f"train: up to step {number}, {who} left these operations to the CPU: {new}", flush=True)

    def _trained(self, progress: TrainingProgress, log: metrics.MetricsLog) -> TrainingResult:
        """What a training run that has ended leaves."""
        self._note_left(progress.step)  # those of its last checkpoint
        first, last = progress.first_expert_load, progress.last_expert_load
        if self.ranks.is_rank_0 and expert_load.grew_uneven(first, last):
            print(f"train: routing grew uneven: {expert_load.described(first, last)}", flush=True)
        trained = checkpoint_directory.of_trained(
            self.task, progress, leads=self.ranks.is_rank_0, shared=self.state.volume.shared
        )
        facts = log.facts(progress, self.model.trainable_parameters)
        facts |= {"total_parameters": self.model.total_parameters, "sharding": str(self.task.layout.sharding)}
        return TrainingResult(trained, facts)

    def trial(self) -> None:
        """The operations of training, once."""
        if self.validation:
            self._means(rows=1)
        self.step(1, [])

    def _validate(self, log: metrics.MetricsLog, number: int) -> tuple[float, dict[str, float]]:
        """The validation loss after step `number`.

        And by name: the objective's other metrics, the loss over each of several sources, and the answers' ROUGE.
        """
        with log.validating():
            means = self._means()
            scores = self.rouge.measure(self.model.module, number) if self.rouge else {}
        loss, *others = means.overall
        names = (f"validation_{name}" for name in self.objective.metrics)
        of_sources = {f"{OF_SOURCE}{name}": values[0] for name, values in means.of_sources.items()}
        return loss, dict(zip(names, others, strict=True)) | of_sources | scores

    def _means(self, rows: int | None = None) -> Means:
        assert self.validation is not None
        module = self.model.module
        sums = self.pipeline.sums if self.pipeline else partial(self.objective.sums, module)
        return self.validation.means(module, lambda batch: sums(self.inputs(batch)), rows)

    def _may_launch(self, launched: Sequence[LaunchedStep], stopping: bool) -> bool:
        """Whether the next step begins, of `launched` ones whose outcomes were not read.

        An accelerator has a step to compute while the outcome of the one before is read; but not before that has been
        saved or validated, if it will be.
        """
        if not launched:
            return True
        newest = launched[-1].number
        return not (
            stopping
            or len(launched) > self.steps_ahead
            or newest == self.total_steps
            or self.state.saves_after(newest)
            or self._validates_after(newest)
        )

    def _validates_after(self, number: int) -> bool:
        every = self.config.validate_every_steps
        return number == self.total_steps or bool(every and number % every == 0)

    def step(self, number: int, signals: list[int]) -> Step:
        """One optimizer step (from 1). Raises UserError, on every rank, when loss or gradients are not finite."""
        return self.launch(number, signals).read(self.metrics)

    def launch(self, number: int, signals: list[int]) -> LaunchedStep:
        """One optimizer step, whose outcome an accelerator may still be computing."""
        means, share_of_norm = self.forward_backward(number)
        rate = learning_rate(self.config, number, self.total_steps)
        counts = self.model.expert_counts.take()
        # the means are equal on the ranks of a tp group, so each contributes its share
        launched = LaunchedStep(number, rate, means / self.tensor_parallel, share_of_norm, signals, counts)
        self.optimizer.step(rate, launched.grad_norm)
        return launched

    def forward_backward(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the gradients of step `number`'s mean loss, with that of routers if there is one.

        Returns the part of the loss, without routers', and of the metrics that is of this rank's tokens, which in a
        pipeline the last stage has, fp32 [1 + metrics], and the rank's share of the squared gradient norm, fp32 [].
        """
        count = self.objective.count(self.rows, self.order.step(number), f"step {number}")
        last = self.config.gradient_accumulation_steps - 1
        if self.pipeline:
            micro_batches = [self._micro_batch(number, index) for index in range(last + 1)]
            total = self.pipeline.forward_backward(micro_batches, count)
            return total, self.trained_weights.after_backward()
        total = torch.zeros(1 + len(self.metrics), device=self.device)
        for index in range(last + 1):
            heartbeat.beat()
            self.trained_weights.before_backward(last=index == last)
            # divided by the count of the whole step, so that sums over micro batches and ranks are its mean
            inputs = self.made_ahead.pop((number, index), None) or self._micro_batch(number, index)
            means = self.objective.sums(self.model.module, inputs) / count
            loss = means[0]
            if balancing := self.model.router_loss:
                of_routers = balancing.take() / ((last + 1) * self.order.data_parallel)
                loss = loss + balancing.coefficient * of_routers
                means = torch.cat([means, of_routers[None]])
            loss.backward()
            total += means.detach()
            if index < last or number < self.total_steps:
                following = (number, index + 1) if index < last else (number + 1, 0)
                self.made_ahead = {following: self._micro_batch(*following)}
        return total, self.trained_weights.after_backward()

    def _micro_batch(self, step: int, index: int) -> dict[str, torch.Tensor]:
        rows = self.order.micro_batches(step, self.data_parallel_rank)[index]
        return self.inputs(self.rows.batch(rows))

    def inputs(self, batch: Batch | Seq2SeqBatch) -> dict[str, torch.Tensor]:
        """The model's arguments for a batch, on the device."""
        return self.objective.inputs(batch, self.device, devices.compiles(self.config, self.device))
