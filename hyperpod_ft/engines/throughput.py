"""Training speed: rates computed from the model FLOPs and the rows of an optimizer step and the time it took.

Model FLOPs are the operations that the model requires, whatever the hardware executes. A dense decoder multiplies each
token by every matrix: per parameter, 2 operations forward, 2 for the gradient of the
matrix's input and 2 for that of the matrix itself (Kaplan et al., arXiv:2001.08361, section 2.1). A frozen matrix, such
as one with LoRA factors, needs no weight gradient: 4 instead of 6. Of experts, those count that a token passes through.
Attention over T positions adds
12 * L * H * Q * T for L layers of H heads of size Q (Chowdhery et al., arXiv:2204.02311, appendix B), trained or not,
since gradients flow through it; as in that paper, nothing is deducted for the causal mask
or for the borders of packed documents.

Tokens of a T5's encoder pass its layers and the key and value matrices of the decoder's attention to them; tokens of
the decoder its other matrices and the output matrix. Attention over k keys adds 12 * H * Q * k operations to each
query.

Model FLOPs exclude what gradient checkpointing recomputes, so utilization measures useful work.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from hyperpod_ft.checkpoint.formats.model_directory import EMBEDDINGS, is_classifier, read_config
from hyperpod_ft.config.sections.inputs import Preparation
from hyperpod_ft.config.sections.training import last_parts
from hyperpod_ft.engines.interface import TrainingTask
from hyperpod_ft.planning.lora import target_names
from hyperpod_ft.planning.model_fit import shape_of
from hyperpod_ft.planning.model_shape import ModelShape
from hyperpod_ft.planning.t5_shape import T5Shape
from hyperpod_ft.planning.undivided.files import files_shape
from hyperpod_ft.planning.undivided.shape import UndividedShape, adapter_parameters


def flops_per_token(
    shape: ModelShape,
    sequence_length: int,
    adapters: int | None = None,
    *,
    trains_output: bool = False,
    has_output: bool = True,
) -> float:
    """Operations to train on one token, forward and backward.

    `adapters`: their elements, of experts those that a token passes through; None when all parameters are trained.
    `trains_output`: the output matrix is trained whole beside them. `has_output`: not of a reward model, whose shape is
    that of the language model that it comes from.
    """
    matrix = shape.vocabulary * shape.hidden
    # an embedding is looked up, not multiplied, unless it is also the output matrix
    lookup = (0 if shape.tied else matrix) + shape.positions * shape.hidden
    used = shape.active_parameters if isinstance(shape, UndividedShape) else shape.parameters
    multiplied = used - lookup - (not has_output) * matrix
    trained = multiplied if adapters is None else trains_output * matrix
    attention = 12 * shape.layers * shape.query_width * sequence_length
    return float(4 * (multiplied - trained) + 6 * (trained + (adapters or 0)) + attention)


def t5_flops_per_token(shape: T5Shape, dataset: Preparation, targets: frozenset[str], rank: int | None) -> float:
    """Operations to train on a row, forward and backward, divided by its positions in both parts.

    `rank`: of the adapters on `targets`; None when all parameters are trained.
    """
    assert dataset.max_target_length is not None
    source, target = dataset.max_length, dataset.max_target_length
    of_source = of_target = 0
    for name, (inputs, outputs) in shape.matrices.items():
        encoder, decoder = shape.times(name)
        crossing = shape.decoder_layers if name in ("k", "v") else 0
        of_source += (encoder + crossing) * inputs * outputs
        of_target += (decoder - crossing) * inputs * outputs
    of_target += shape.vocabulary * shape.hidden
    each = 6 if rank is None else 4  # a frozen matrix needs no weight gradient
    operations = each * (source * of_source + target * of_target)
    if rank is not None:
        adapters = shape.adapters(targets, rank)
        operations += 6 * (source * adapters[0] + target * adapters[1])
    pairs = shape.encoder_layers * source**2 + shape.decoder_layers * (target**2 + target * source)
    return (operations + 12 * shape.query_width * pairs) / (source + target)


@dataclass(frozen=True)
class Rates:
    """Rates over some optimizer steps, of rows and of the examples packed into them (`documents_per_second`)."""

    seconds_per_step: float
    rows_per_second: float
    documents_per_second: float | None
    tokens_per_second: float  # all positions of the rows, padding included; or those of `TrainingProgress.tokens`
    mfu: float | None  # model-FLOPs utilization, 0 to 1, of the ranks' dense bf16 peak


@dataclass(frozen=True)
class Throughput:
    """The work of one optimizer step on all ranks, and their peak performance."""

    rows_per_step: int
    max_length: int  # tokens in a row
    documents_per_row: float | None  # on average over the training rows
    flops_per_token: float | None  # None: unknown for this model family or objective
    peak_flops: float  # of all ranks, per second; 0: unknown for this machine

    def rates(self, steps: int, seconds: float, counted: int | None = None) -> Rates:
        """The rates of `steps` steps that took `seconds` together; `counted`: their tokens, if not those of rows."""
        rows = steps * self.rows_per_step / seconds
        tokens = rows * self.max_length if counted is None else counted / seconds
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

    Raises UserError when config.json, or a file that tells the size of the model, is missing or damaged.
    """
    return Throughput(
        rows_per_step=rows_per_step,
        max_length=max_length,
        documents_per_row=task.documents_per_row,
        flops_per_token=_flops(task, known_shape(task.base_model), max_length, trainable_parameters),
        peak_flops=task.config.instance.rank_tflops * 1e12 * task.layout.degrees.world_size,
    )


def known_shape(directory: Path) -> ModelShape | None:
    """The shape of the language model in a directory; None where not all that a token passes through is known."""
    config = read_config(directory)
    shape = shape_of(config)
    if shape is None and (found := files_shape(directory, config)):
        # the files of a reward model have one matrix at its ends, like those of a language model with tied ones
        shape = replace(found, tied=found.tied or is_classifier(config))
    if shape is None or not shape.heads:
        return None
    # of a mixture without a row, nothing says which parameters are the experts
    unknown = isinstance(shape, UndividedShape) and shape.experts and not shape.complete
    return None if unknown else shape


def _flops(task: TrainingTask, shape: ModelShape | None, max_length: int, trainable_parameters: int) -> float | None:
    config, lora = task.config, task.config.lora if task.config.training.method == "lora" else None
    if isinstance(shape, T5Shape):
        names = target_names(config.lora, shape.model_type)
        return t5_flops_per_token(shape, config.dataset, names, lora.r if lora else None)
    if config.training.samples_answers or config.training.objective == "kto" or config.dataset.images:
        # how long sequences become is not known, nor what it took to sample or compare them, or to read images
        return None
    if shape is None:
        return None
    has_output = config.training.objective != "reward"
    if lora is None:
        return flops_per_token(shape, max_length, has_output=has_output)
    whole = last_parts(lora.modules_to_save)
    adapters = trainable_parameters - len(whole) * shape.vocabulary * shape.hidden
    if isinstance(shape, UndividedShape):
        of_experts = adapter_parameters(shape.adapted_experts(lora.target_parameters), lora.r)
        adapters -= round(of_experts * (1 - shape.used_share))
    trains_output = bool(whole.difference(EMBEDDINGS))
    return flops_per_token(shape, max_length, adapters, trains_output=trains_output, has_output=has_output)
