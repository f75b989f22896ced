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

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperpod_ft.checkpoint.formats.model_directory import (
    OUTPUT,
    SHARED_ALIASES,
    embedding,
    is_encoder_decoder,
    is_tied,
    language_names,
    of_language_model,
    read_config,
    without_predictors,
)
from hyperpod_ft.checkpoint.formats.safetensors_file import read_model
from hyperpod_ft.config.sections.inputs import Preparation
from hyperpod_ft.engines.interface import TrainingTask
from hyperpod_ft.planning.families import family_of
from hyperpod_ft.planning.lora import target_names
from hyperpod_ft.planning.t5_shape import T5Shape, t5_shape
from hyperpod_ft.planning.undivided.files import EXPERT_COUNTS
from hyperpod_ft.planning.undivided.mixture import mixture_shape
from hyperpod_ft.planning.undivided.shape import adapter_parameters

_NEEDED = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads")
_POSITIONS = "max_position_embeddings"


def flops_per_token(
    model_config: Mapping[str, Any],
    total_parameters: int,
    trainable_parameters: int,
    sequence_length: int,
    *,
    tied: bool,
) -> float | None:
    """Operations to train on one token, forward and backward; None for model families with other keys.

    `model_config` is the parsed `config.json` of a Hugging Face model. Both parameter counts cover the
    whole model with its adapters, of experts those that a token passes through; trainable are either all parameters, or
    the adapters and an output matrix that is trained whole. `tied`: the embedding is also
    the output matrix, and is counted once.
    """
    family = family_of(str(model_config.get("model_type", "")))
    spelled = family.attribute_map if family else {}
    found = {key: model_config.get(spelled.get(key, key)) for key in (*_NEEDED, _POSITIONS)}
    if not all(isinstance(found[key], int) for key in _NEEDED):
        return None
    hidden, vocabulary, layers, heads = (int(found[key] or 0) for key in _NEEDED)
    head_size = int(model_config.get("head_dim") or hidden // heads)
    # an embedding is looked up, not multiplied, unless it is also the output matrix
    lookup = 0 if tied else vocabulary * hidden
    if family and family.positions:
        lookup += int(found[_POSITIONS] or 0) * hidden
    multiplied = total_parameters - lookup
    trained = min(trainable_parameters, multiplied)
    attention = 12 * layers * heads * head_size * sequence_length
    return float(4 * (multiplied - trained) + 6 * trained + attention)


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

    Raises UserError when the base model's files are missing or damaged.
    """
    total, tied = base_parameters(task.base_model)
    trained, of_base = total, total
    if task.config.training.method == "lora":
        looked_up, of_base = _trained_whole(task.base_model, task.config.lora.modules_to_save)
        trained = trainable_parameters - looked_up
        total += trained - of_base
    model_config = of_language_model(read_config(task.base_model))
    if shape := t5_shape(model_config):
        lora = task.config.lora
        rank = lora.r if task.config.training.method == "lora" else None
        names = target_names(lora, shape.model_type)
        flops: float | None = t5_flops_per_token(shape, task.config.dataset, names, rank)
    elif task.config.training.samples_answers or task.config.training.objective == "kto" or task.config.dataset.images:
        # how long sequences become is not known, nor what it took to sample or compare them, or to read images
        flops = None
    else:
        flops = _decoder_flops(task, model_config, total, trained, of_base, max_length, tied=tied)
    rank_flops = task.config.instance.rank_tflops * 1e12
    return Throughput(
        rows_per_step=rows_per_step,
        max_length=max_length,
        documents_per_row=task.documents_per_row,
        flops_per_token=flops,
        peak_flops=rank_flops * task.layout.degrees.world_size,
    )


def _trained_whole(directory: Path, modules: tuple[str, ...]) -> tuple[int, int]:
    """Parameters of the base that are trained beside adapters: an embedding's, and those that tokens are multiplied by.

    An embedding is looked up: counted as trained, it would take the place of frozen matrices.
    """
    if not modules:
        return 0, 0
    found = without_predictors(read_config(directory), {tensor.name: tensor for tensor in read_model(directory)})
    whole = {name: tensor.elements for name, tensor in found.items() if name.rpartition(".")[0].endswith(modules)}
    looked_up = whole.pop(embedding(found) or "", 0)
    return looked_up, sum(whole.values())


def _decoder_flops(
    task: TrainingTask,
    model_config: Mapping[str, Any],
    total: int,
    trained: int,
    of_base: int,
    max_length: int,
    *,
    tied: bool,
) -> float | None:
    """Of a mixture, a token passes through some experts and their adapters only. None for layers of other kinds.

    `of_base`: how many of the trained parameters are the base's own.
    """
    shape = mixture_shape(model_config)
    if shape is None:
        # for other mixtures, nothing says which parameters are the experts
        mixture = any(model_config.get(key) for key in EXPERT_COUNTS)
        return None if mixture else flops_per_token(model_config, total, trained, max_length, tied=tied)
    if not shape.complete:
        return None
    active, lora = shape.active_parameters, task.config.lora
    if task.config.training.method == "full":
        trained = total = active
    else:
        adapters = adapter_parameters(shape.adapted_experts(lora.target_parameters), lora.r)
        trained -= round(adapters * (1 - shape.used_share))
        total = active + trained - of_base
    heads = {"head_dim": shape.head_dim}
    return flops_per_token({**model_config, **heads}, total, trained, max_length, tied=shape.tied)


def base_parameters(directory: Path) -> tuple[int, bool]:
    """Parameters of the language model in a directory, from its file headers, and whether its output matrix is tied.

    A tied output matrix counts once.
    """
    config = read_config(directory)
    found = {tensor.name: tensor.elements for tensor in read_model(directory)}
    tensors = {name: found[name] for name in language_names(config, found)}
    tied = is_tied(config, tensors)
    aliases = [OUTPUT] if tied else []
    if is_encoder_decoder(config):
        aliases += SHARED_ALIASES
    for name in aliases:
        tensors.pop(name, None)
    return sum(tensors.values()), tied
