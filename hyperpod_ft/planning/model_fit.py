"""Checks that a run can pack for its model, split it, and fit it into the accelerators; needs only its config.json."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hyperpod_ft.checkpoint.formats.added_tokens import with_room
from hyperpod_ft.checkpoint.formats.json_file import read_object
from hyperpod_ft.checkpoint.formats.model_directory import (
    is_classifier,
    is_encoder_decoder,
    is_image_text,
    of_language_model,
    read_config,
    refuse_undecodable,
)
from hyperpod_ft.checkpoint.formats.safetensors_file import read_model
from hyperpod_ft.config.fields import shown
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sections.training import Training
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.certificate import Certificate
from hyperpod_ft.planning.engine_rules import limits_of, rules_of
from hyperpod_ft.planning.families import CAUSAL_IMAGE_TEXT
from hyperpod_ft.planning.layout import Degrees, Layout, divisors
from hyperpod_ft.planning.memory import GIB, Memory, available
from hyperpod_ft.planning.model_shape import ModelShape, model_shape
from hyperpod_ft.planning.parallelism import check_model, degrees_of, on_nodes
from hyperpod_ft.planning.t5_shape import t5_shape
from hyperpod_ft.planning.torch.step_memory import checkpoint_memory
from hyperpod_ft.planning.trl.limits import check_teacher
from hyperpod_ft.planning.undivided.files import files_shape
from hyperpod_ft.planning.undivided.mixture import mixture_shape
from hyperpod_ft.planning.undivided.shape import UndividedShape

# keys of the run file and their new values
Change = dict[str, Any]

_FACTORS = (2, 4, 8)  # of nodes, pipeline stages and ranks that share a row


@dataclass(frozen=True)
class TrainingFit:
    """How a run fits its accelerators."""

    layout: Layout
    sharding: str  # what data-parallel ranks divide, in words
    memory: Memory | None  # None: unknown, or no accelerators
    unknown: str  # what is not known of the memory, in one line; empty without accelerators
    pipeline: str | None = None  # how it is cut, in words; None without one
    checkpoint_memory: float | None = 0.0  # bytes of a node's own memory; None: unknown


def check_model_directory(
    config: RunConfig,
    degrees: Degrees,
    directory: Path,
    certificate: Certificate | None = None,
    teacher: Path | None = None,
) -> TrainingFit:
    """How a run that trains a model on disk fits. Raises UserError when the run cannot train it.

    If config.json does not give the sizes of a type, its weight files do, once they are there. `certificate`: None
    before stage certify has run, and with engine neuron. `teacher`: the directory of the run's; None before it is here.
    """
    found = read_config(directory, "set model.source to the directory of a Hugging Face model")
    model_config = with_room(found, directory, config.model.new_tokens, config.model.new_special_tokens)
    _check_evaluation(config, model_config)
    if certificate:
        certificate.check(config, degrees)
    shape, rules = check_trainable(config, degrees, model_config), rules_of(config.engine)
    if shape is None:
        shape = files_shape(directory, model_config)
    if teacher:
        parameters = _teacher_parameters(config, teacher, directory)
        shape = replace(shape, teacher=parameters) if shape else None
    memory = check_memory(config, degrees, shape) if shape else None
    packs = certificate is not None and not certificate.not_packed
    own_attention = packs and not is_encoder_decoder(model_config)
    layout = replace(rules.layout(config, degrees, shape), own_attention=own_attention)
    if certificate:
        certificate.check_layout(layout)
    pipeline = rules.explain_pipeline(config, degrees, shape) if shape else None
    unknown = _unknown(config, shape, model_config) if available(config) else ""
    if available(config) and config.teacher and teacher is None:
        unknown = "at least that: the teacher's size is known after download"
    in_memory = checkpoint_memory(config, degrees, shape, layout.sharding) if shape else None
    return TrainingFit(layout, rules.sharding(config, degrees, shape), memory, unknown, pipeline, in_memory)


def check_all_nodes(
    config: RunConfig,
    degrees: Degrees,
    directory: Path,
    certificate: Certificate | None = None,
    teacher: Path | None = None,
) -> TrainingFit:
    """As `check_model_directory`, and whether it fits the fewest nodes that training may go on with."""
    fit = check_model_directory(config, degrees, directory, certificate, teacher)
    if config.cluster.min_nodes:
        fewest = on_nodes(config, degrees, config.cluster.min_nodes)
        check_model_directory(fewest, degrees_of(fewest), directory, certificate, teacher)
    return fit


def _teacher_parameters(config: RunConfig, teacher: Path, directory: Path) -> int:
    """How many the teacher has.

    Raises UserError when the run cannot learn from it, or it has not the vocabulary of the model in `directory`, as far
    as the files are here.
    """
    check_teacher(config, read_config(teacher))
    (size, tokens), (other_size, other_tokens) = (_vocabulary(each) for each in (directory, teacher))
    if size != other_size or (tokens and other_tokens and tokens != other_tokens):
        raise UserError(
            "teacher.source: the teacher's vocabulary is not that of model.source",
            "choose a teacher that has the same tokenizer and vocab_size",
        )
    return sum(math.prod(tensor.shape) for tensor in read_model(teacher))


def _vocabulary(directory: Path) -> tuple[Any, Any]:
    """The size in config.json, and tokens and added tokens of tokenizer.json; None without the file."""
    path, size = directory / "tokenizer.json", of_language_model(read_config(directory)).get("vocab_size")
    if not path.exists():
        return size, None
    described = read_object(path, "restore it")
    added = {token.get("id"): token.get("content") for token in described.get("added_tokens", ())}
    return size, (described.get("model", {}).get("vocab"), added)


def _unknown(config: RunConfig, shape: ModelShape | None, model_config: Mapping[str, Any]) -> str:
    family = of_language_model(model_config).get("model_type") or "(none)"
    if shape is None:
        return f"config.json does not give the sizes of {family} models; those of most types are known after download"
    if not any(rules_of(config.engine).step_memory(config, degrees_of(config), shape)):
        return f"it is not known for {family} models with engine {config.engine}"
    if isinstance(shape, UndividedShape) and not shape.complete:
        return f"at least that: what layers of {family} models keep beside their matrices is not counted"
    if config.engine == "trl" and is_image_text(model_config):  # which it loads whole
        return "at least that: what reads images is not counted"
    return ""


def _check_evaluation(config: RunConfig, model_config: Mapping[str, Any]) -> None:
    """Refuse section eval for a model that lm-evaluation-harness cannot load, which it would say after the training."""
    family = str(model_config.get("model_type", ""))
    if config.eval and is_image_text(model_config) and family not in CAUSAL_IMAGE_TEXT:
        raise UserError(
            f"eval: lm-evaluation-harness cannot load image-text models of type {shown(family)}",
            "remove the section, and evaluate the tuned model with another program",
        )


def check_trainable(config: RunConfig, degrees: Degrees, model_config: Mapping[str, Any]) -> ModelShape | None:
    """The shape of a model that the run can train, as far as its memory allows; None where it is unknown.

    `model_config`: its config.json. Raises UserError when the engine cannot train it, or divide it by these degrees.
    """
    refuse_undecodable(model_config)
    if is_classifier(model_config) and config.training.objective != "reward":
        raise UserError("model.source: is a reward model, which writes no answers", "choose a language model")
    limits_of(config.engine).check_model_config(config, degrees, model_config)
    shape = shape_of(model_config)
    if shape is not None:
        check_model(config, degrees, shape)
    return shape


def shape_of(model_config: Mapping[str, Any]) -> ModelShape | None:
    """The shape that a parsed config.json describes; None where it does not say enough of a model of its type."""
    language = of_language_model(model_config)
    return model_shape(model_config) or t5_shape(model_config) or mixture_shape(language)


def estimate(config: RunConfig, degrees: Degrees, shape: ModelShape) -> Memory | None:
    """Memory of a training step on the fullest rank; None where it is not known.

    `shape` has passed `check_trainable`.
    """
    memories = rules_of(config.engine).step_memory(config, degrees, shape)
    return max(memories, key=lambda memory: memory.total, default=None)


def check_memory(config: RunConfig, degrees: Degrees, shape: ModelShape) -> Memory | None:
    """The memory that a training step takes on the fullest rank; None without accelerators, or where it is not known.

    Raises UserError when the accelerator has less, with the arithmetic and a change that would fit.
    """
    room = available(config)
    if not room:
        return None
    memory = estimate(config, degrees, shape)
    if memory is None or memory.total <= room:
        return memory
    instance = config.instance
    raise UserError(
        f"training.method {config.training.method}: needs {memory}, and {instance.name} has {room / GIB:.1f} of its"
        f" {instance.rank_gib:g} GiB available",
        _remedy(config, shape, room),
    )


def _remedy(config: RunConfig, shape: ModelShape, room: float) -> str:
    """The first single change that fits, else the first combination; on more nodes only if needed."""
    ladder: list[Change] = []
    for more in (_on_these_nodes(config), _on_more_nodes(config)):
        ladder += more
        for change in ladder:
            if (total := _total(config, change, shape)) <= room:
                return _would_fit(change, total)
        together: Change = {}
        least = _total(config, together, shape)
        for change in ladder:
            if (total := _total(config, together | change, shape)) < least:
                together, least = together | change, total
            if least <= room:
                return _would_fit(together, least)
    return "choose a smaller model, or an instance type with more memory"


def _would_fit(change: Change, total: float) -> str:
    settings = ", ".join(f"{key}: {str(value).lower()}" for key, value in change.items())
    return f"this would fit, with {total / GIB:.1f} GiB: {settings}"


def _total(config: RunConfig, change: Change, shape: ModelShape) -> float:
    """Bytes on the fullest rank after a change; infinite when the run file or the model does not allow it."""
    values = config.model_dump()
    for key, value in change.items():
        section, name = key.split(".")
        values[section][name] = value
    try:
        changed = RunConfig.model_validate(values)
        degrees = degrees_of(changed)
        limits_of(changed.engine).check_family(changed, degrees, shape.model_type)
        check_model(changed, degrees, shape)
        memory = estimate(changed, degrees, shape)
        return memory.total if memory else math.inf
    except (ValidationError, UserError):
        return math.inf


def _on_these_nodes(config: RunConfig) -> Iterator[Change]:
    """The changes that save memory, in the order a user would try them.

    First those that cost time, then other degrees, then LoRA instead of all parameters. A change that the engine does
    not allow is never proposed (`_total`).
    """
    training, degrees = config.training, degrees_of(config)
    yield from ({"training.activation_checkpointing": choice} for choice in ("selective", "full"))
    yield {"training.activation_offload": True}
    yield from ({key: value} for key, value in rules_of(config.engine).MEMORY_SETTINGS)
    yield from _smaller_micro_batches(training)
    larger = (degree for degree in divisors(degrees.ranks_per_node) if degree > degrees.tensor_parallel)
    yield from ({"parallelism.tensor_parallel": degree} for degree in larger)
    yield from ({"parallelism.context_parallel": degrees.context_parallel * more} for more in _FACTORS)
    yield from ({"parallelism.pipeline_parallel": degrees.pipeline_parallel * more} for more in _FACTORS)
    if training.method == "full":
        yield {"training.method": "lora"}


def _on_more_nodes(config: RunConfig) -> Iterator[Change]:
    for more in _FACTORS:
        nodes: Change = {"cluster.nodes": config.cluster.nodes * more}
        yield nodes
        yield {"parallelism.pipeline_parallel": config.parallelism.pipeline_parallel * more} | nodes


def _smaller_micro_batches(training: Training) -> Iterator[Change]:
    """Halved again and again, with as many rows in a step."""
    rows = training.micro_batch_size * training.gradient_accumulation_steps
    size = training.micro_batch_size // 2
    while size:
        if rows % size == 0:
            yield {"training.micro_batch_size": size, "training.gradient_accumulation_steps": rows // size}
        size //= 2
