"""Training speed: rates computed from the work in one optimizer step and the time it took."""

from dataclasses import dataclass
from pathlib import Path

from hyperpod_ft.checkpoint.formats.model_directory import (
    OUTPUT,
    SHARED_ALIASES,
    is_encoder_decoder,
    is_tied,
    read_config,
)
from hyperpod_ft.checkpoint.formats.safetensors_file import read_model
from hyperpod_ft.engines.flops import flops_per_token, t5_flops_per_token
from hyperpod_ft.engines.interface import TrainingTask
from hyperpod_ft.planning.lora import target_names
from hyperpod_ft.planning.t5_shape import t5_shape


@dataclass(frozen=True)
class Rates:
    """Rates over some optimizer steps, of rows and of the examples packed into them (`documents_per_second`)."""

    seconds_per_step: float
    rows_per_second: float
    documents_per_second: float | None
    tokens_per_second: float  # all positions of the rows, padding included
    mfu: float | None  # model-FLOPs utilization, 0 to 1, of the ranks' dense bf16 peak


@dataclass(frozen=True)
class Throughput:
    """The work of one optimizer step on all ranks, and their peak performance."""

    rows_per_step: int
    max_length: int  # tokens in a row
    documents_per_row: float | None  # on average over the training rows
    flops_per_token: float | None  # None: unknown for this model family
    peak_flops: float  # of all ranks, per second; 0: unknown for this machine

    def rates(self, steps: int, seconds: float) -> Rates:
        """The rates of `steps` steps that took `seconds` together."""
        rows = steps * self.rows_per_step / seconds
        tokens = rows * self.max_length
        known = self.flops_per_token is not None and self.peak_flops > 0
        return Rates(
            seconds_per_step=round(seconds / steps, 4),
            rows_per_second=round(rows, 3),
            documents_per_second=round(rows * self.documents_per_row, 3) if self.documents_per_row else None,
            tokens_per_second=round(tokens, 1),
            mfu=round(tokens * (self.flops_per_token or 0.0) / self.peak_flops, 4) if known else None,
        )


def throughput(task: TrainingTask, rows_per_step: int, max_length: int, trainable_parameters: int) -> Throughput:
    """The throughput of a task; `trainable_parameters` counts the whole model, on all ranks.

    Raises UserError when the base model's files are missing or damaged.
    """
    total, tied = base_parameters(task.base_model)
    if task.config.training.method == "lora":
        total, trained = total + trainable_parameters, trainable_parameters
    else:
        trained = total
    model_config = read_config(task.base_model)
    if shape := t5_shape(model_config):
        lora = task.config.lora
        rank = lora.r if task.config.training.method == "lora" else None
        names = target_names(lora, shape.model_type)
        flops: float | None = t5_flops_per_token(shape, task.config.dataset, names, rank)
    else:
        flops = flops_per_token(model_config, total, trained, max_length, tied=tied)
    rank_flops = task.config.instance.rank_tflops * 1e12
    return Throughput(
        rows_per_step=rows_per_step,
        max_length=max_length,
        documents_per_row=task.documents_per_row,
        flops_per_token=flops,
        peak_flops=rank_flops * task.layout.degrees.world_size,
    )


def base_parameters(directory: Path) -> tuple[int, bool]:
    """Parameters of the model in a directory, from its file headers, and whether its output matrix is tied.

    A tied output matrix counts once.
    """
    tensors = {tensor.name: tensor.elements for tensor in read_model(directory)}
    config = read_config(directory)
    tied = is_tied(config, tensors)
    aliases = [OUTPUT] if tied else []
    if is_encoder_decoder(config):
        aliases += SHARED_ALIASES
    for name in aliases:
        tensors.pop(name, None)
    return sum(tensors.values()), tied
