"""Engine trl: TRL's trainer runs the steps; the kit gives it rows and learning rates, and follows it by a callback."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyperpod_ft import heartbeat
from hyperpod_ft.checkpoint.formats.model_directory import of_language_model, read_config
from hyperpod_ft.config.sections.training import total_steps
from hyperpod_ft.engines import checkpoint_directory
from hyperpod_ft.engines.batches import DataOrder, PackedSplit, held_out
from hyperpod_ft.engines.interface import TrainingResult, TrainingTask
from hyperpod_ft.engines.metrics import MetricsLog
from hyperpod_ft.engines.ranks import (
    COLLECTIVE_TIMEOUT,
    Interrupted,
    Ranks,
    collect_signals,
    device_of,
    peak_memory_mb,
)
from hyperpod_ft.engines.throughput import throughput
from hyperpod_ft.engines.trl import trainer as trainers
from hyperpod_ft.engines.trl.callback import StepsFollower
from hyperpod_ft.engines.trl.checkpoints import TrainerCheckpoints
from hyperpod_ft.engines.trl.rows import numbered
from hyperpod_ft.engines.trl.validation import HeldOutRows


def train(task: TrainingTask, ranks: Ranks, look: Callable[[Any], None] = lambda _: None) -> TrainingResult:
    """Train to the last step; see `hyperpod_ft.engines.interface.Engine`.

    `look` gets the model before the first step, and again after the last.
    """
    device = device_of(task.config.cluster.instance_type, ranks.local_rank)
    with _process_group(ranks), contextlib.ExitStack() as ends:
        return _train(task, ranks, device, ends, look)


@contextlib.contextmanager
def _process_group(ranks: Ranks) -> Iterator[None]:
    """Join the process group for the block; accelerate makes none for a process that torchrun did not start.

    After an error it is not left: the process is expected to end.
    """
    if "LOCAL_RANK" not in os.environ:
        yield
        return
    dist.init_process_group(store=ranks.store, rank=ranks.rank, world_size=ranks.world_size, timeout=COLLECTIVE_TIMEOUT)
    yield
    dist.destroy_process_group()


def _train(
    task: TrainingTask,
    ranks: Ranks,
    device: torch.device,
    ends: contextlib.ExitStack,
    look: Callable[[Any], None],
) -> TrainingResult:
    training = task.config.training
    rows = PackedSplit(task.dataset / "train")
    in_step = task.config.rows_per_step(ranks.world_size)
    steps = total_steps(training, len(rows), in_step)
    order = DataOrder(len(rows), task.config.seed, in_step, training.gradient_accumulation_steps, ranks.world_size)
    checkpoints = TrainerCheckpoints(task, ranks)
    progress = checkpoints.resume()
    begun = progress.step
    ended = begun == steps or progress.stopped_early
    if begun > 0 and not ended:
        progress = replace(progress, resumed_from=(*progress.resumed_from, begun))
    follower = StepsFollower(checkpoints, progress, of_language_model(read_config(task.base_model)).get("vocab_size"))
    trainer, collator = trainers.build(task, rows, numbered(order, steps), steps, checkpoints.directory, follower, ends)
    model: Any = trainer.model
    # in each forward pass: of a batch, and of a token of an answer
    model.get_input_embeddings().register_forward_pre_hook(lambda *_: heartbeat.beat())
    total, trainable = _parameters(model)
    log = MetricsLog(
        task,
        throughput(task, in_step, task.config.row_tokens, trainable),
        len(rows),
        steps,
        progress,
        lambda: peak_memory_mb(device),
    )
    if not ended:
        if ranks.is_rank_0:
            log.open()
            log.announce(f"{trainable:,} of {total:,}", f"{task.layout.sharding}, {device.type}")
        rows_held_out = held_out(task) if collator else None
        validation = HeldOutRows(task, rows_held_out, ranks, collator) if rows_held_out and collator else None
        with checkpoint_directory.reporting_full_volumes(task.checkpoints), collect_signals() as signals:
            follower.follow(trainer, log, validation, signals)
            look(model)
            trainer.train(resume_from_checkpoint=str(task.checkpoint(begun)) if begun else None)
            look(model)
            progress = follower.progress
            if follower.stop and progress.step < steps and not progress.stopped_early:
                raise Interrupted(progress.step, follower.stop, saved=not training.save_only_model)
            if training.save_only_model:
                checkpoints.save_weights(trainer, progress, task.checkpoint(progress.step))
    checkpoints.finish()
    facts = log.facts(progress, trainable) | {"total_parameters": total, "sharding": str(task.layout.sharding)}
    return TrainingResult(checkpoint_directory.of_trained(task, progress, leads=ranks.is_rank_0), facts)


def _parameters(model: nn.Module | None) -> tuple[int, int]:
    """How many there are, and how many of them are trained."""
    assert model is not None
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)
