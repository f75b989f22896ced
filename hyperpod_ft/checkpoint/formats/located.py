"""Where each tensor of a model is in its safetensors files, under the names and in the form that transformers gives it.

Model classes may name or arrange tensors differently from the published files: Mixtral's experts are one tensor in
the class and hundreds in the files. transformers keeps a table of such conversions; here each becomes byte ranges, so
that a rank still reads nothing but its own slice.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from hyperpod_ft.checkpoint.formats import image_text
from hyperpod_ft.checkpoint.formats.model_directory import is_tied, read_config
from hyperpod_ft.checkpoint.formats.safetensors_file import read_model
from hyperpod_ft.checkpoint.tensors.elements import ARITHMETIC
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.errors import UserError

_REMEDY = "make or download the model again"


def locate(model: PreTrainedModel, directory: Path, *, replicas: bool = True) -> dict[str, LogicalTensor]:
    """The stored tensor of every parameter and persistent buffer of `model`, by its name in the model; reads no values.

    `model` may be on the meta device. Tied parameters have one stored tensor; if the files hold it under several
    names, the others are its replicas, or without `replicas` ignored, as transformers does. Raises UserError when a
    file is damaged, a tensor is missing, has another shape or a dtype that cannot be computed with, or needs a
    conversion that this module lacks.
    """
    expected: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    stored = _stored(model, expected, directory)
    names_of: defaultdict[int, list[str]] = defaultdict(list)
    for name, value in expected.items():
        names_of[id(value)].append(name)
    if missing := sorted(names[0] for names in names_of.values() if not stored.keys() & set(names)):
        raise UserError(f"{directory}: {len(missing)} of the model's tensors are missing: {missing[0]}", _REMEDY)
    located: dict[str, LogicalTensor] = {}
    for names in names_of.values():
        first, *others = (stored[name] for name in names if name in stored)
        others = others if replicas else []
        for tensor in (first, *others):
            _check(tensor, expected[names[0]], directory)
        if any(other.dtype != first.dtype for other in others):
            raise UserError(f"{directory}: tensor {first.name} is tied to one of another dtype", _REMEDY)
        whole = replace(first, replicas=tuple(piece for other in others for piece in other.pieces))
        located |= dict.fromkeys(names, whole)
    return located


def _stored(model: PreTrainedModel, expected: dict[str, torch.Tensor], directory: Path) -> dict[str, LogicalTensor]:
    """The stored tensors that the model has, by their names in it."""
    files = {tensor.name: tensor for tensor in read_model(directory)}
    inner = image_text.language_model(directory)
    if inner is None or isinstance(model, type(inner.whole)):
        return _converted(model, files, expected, directory)
    names = {inner.name_in_whole(name): name for name in expected}
    found = _converted(inner.whole, files, {whole: expected[name] for whole, name in names.items()}, directory)
    # what the files do not have like this is known by its name in the language model
    return {names[whole]: one if one.name in files else one.renamed(names[whole]) for whole, one in found.items()}


def untie_head(model: PreTrainedModel, directory: Path) -> None:
    """Give the output layer of an encoder-decoder its own weight, if the files have one as those of T5 v1.1 do.

    transformers 5 ties it until it reads the files.
    """
    names = [tensor.name for tensor in read_model(directory)] if model.config.is_encoder_decoder else []
    if names and not is_tied(read_config(directory), names):
        head: Any = model.get_output_embeddings()
        head.weight = nn.Parameter(torch.empty_like(head.weight))


def names_in_checkpoints(
    model: PreTrainedModel, located: Mapping[str, LogicalTensor], directory: Path
) -> dict[str, str]:
    """What trained parameters are called in checkpoints, where it is not their name in the model.

    Without adapters, those that transformers only renames have the files' names. PEFT loads an adapter into the live
    model: with adapters, those in an image-text model have their names in the whole.
    """
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if any(".lora_" in name for name in trained):
        return image_text.names_in_whole(directory, trained)
    return {name: tensor.name for name, tensor in located.items() if tensor.name not in located}


def _check(tensor: LogicalTensor, expected: torch.Tensor, directory: Path) -> None:
    if tensor.shape != tuple(expected.shape):
        raise UserError(
            f"{directory}: tensor {tensor.name} has shape {list(tensor.shape)}, but config.json requires"
            f" {list(expected.shape)}",
            _REMEDY,
        )
    if expected.is_floating_point() and tensor.dtype not in ARITHMETIC:
        raise UserError(
            f"{directory}: tensor {tensor.name} has dtype {tensor.dtype}, which cannot be fine-tuned",
            "use the model in bf16, fp16 or fp32",
        )


def _converted(
    model: PreTrainedModel,
    tensors: Mapping[str, LogicalTensor],
    expected: dict[str, torch.Tensor],
    directory: Path,
) -> dict[str, LogicalTensor]:
    """Stored tensors by their names in the model, as transformers' `convert_and_load_state_dict_in_model` finds them.

    Tensors that the model does not have are left out.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    found: dict[str, LogicalTensor] = {}
    parts: dict[str, dict[str, list[LogicalTensor]]] = {}
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, expected)
        if target not in expected and name in expected:
            target, pattern = name, None
        if target not in expected:
            continue
        if pattern is None:
            found.setdefault(target, tensors[name])
        else:
            parts.setdefault(target, {}).setdefault(pattern, []).append(tensors[name])
    for target, sources in parts.items():
        found |= _convert(converter_of[next(iter(sources))], sources, target, model.config, directory)
    return found


def _convert(
    converter: WeightConverter,
    sources: Mapping[str, list[LogicalTensor]],
    target: str,
    config: Any,
    directory: Path,
) -> dict[str, LogicalTensor]:
    """The model's tensors that a converter makes of stored ones, by name. `sources`: by the pattern that they match."""
    groups = [sources[pattern] for pattern in converter.source_patterns if pattern in sources]
    targets = converter.target_patterns
    try:
        for operation in converter.operations:
            if isinstance(operation, MergeModulelist):
                groups = [[_stack(group, operation.dim)] for group in groups]
            elif isinstance(operation, Concatenate):
                groups = [[_concatenate([tensor for group in groups for tensor in group], operation.dim)]]
            elif isinstance(operation, Chunk):
                targets = operation.get_target_patterns(targets, config=config)
                groups = [[chunk] for chunk in _chunks(groups[0][0], len(targets), operation.dim)]
            else:
                raise UserError(
                    f"{directory}: engine torch cannot load {config.model_type}: its tensor {target} needs"
                    f" {type(operation).__name__}",
                    "use a model of another family",
                )
    except (ValueError, IndexError) as error:
        raise UserError(f"{directory}: the parts of tensor {target} do not fit together: {error}", _REMEDY) from error
    names = [target.replace(targets[0], pattern) for pattern in targets]
    return {name: group[0].renamed(name) for name, group in zip(names, groups, strict=True)}


def _stack(tensors: Sequence[LogicalTensor], dim: int) -> LogicalTensor:
    """Tensors of one shape as one with a new dimension."""
    expanded = []
    for tensor in tensors:
        shape = (*tensor.shape[:dim], 1, *tensor.shape[dim:])
        pieces = (
            replace(
                piece,
                start=(*piece.start[:dim], 0, *piece.start[dim:]),
                shape=(*piece.shape[:dim], 1, *piece.shape[dim:]),
                # of one element: its stride is never used, but keeps their order
                strides=(*piece.strides[:dim], piece.strides[dim] * piece.shape[dim], *piece.strides[dim:]),
            )
            for piece in tensor.pieces
        )
        expanded.append(replace(tensor, shape=shape, pieces=tuple(pieces)))
    return _concatenate(expanded, dim)


def _concatenate(tensors: Sequence[LogicalTensor], dim: int) -> LogicalTensor:
    pieces = []
    length = 0
    for tensor in tensors:
        _alike(tensor, tensors[0], dim)
        for piece in tensor.pieces:
            start = (*piece.start[:dim], piece.start[dim] + length, *piece.start[dim + 1 :])
            pieces.append(replace(piece, start=start))
        length += tensor.shape[dim]
    shape = (*tensors[0].shape[:dim], length, *tensors[0].shape[dim + 1 :])
    return replace(tensors[0], shape=shape, pieces=tuple(pieces))


def _alike(tensor: LogicalTensor, first: LogicalTensor, dim: int) -> None:
    one, other = ((each.dtype, len(each.shape), *each.shape[:dim], *each.shape[dim + 1 :]) for each in (tensor, first))
    if one != other:
        raise ValueError(f"{tensor.name} is {tensor.dtype} {list(tensor.shape)}, {first.name} is not")


def _chunks(tensor: LogicalTensor, count: int, dim: int) -> list[LogicalTensor]:
    """Equal parts along a dimension."""
    if tensor.shape[dim] % count:
        raise ValueError(f"{tensor.name} has shape {list(tensor.shape)}, not divisible by {count}")
    size = tensor.shape[dim] // count
    shape = (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])
    begins = (tuple(index * size if axis == dim else 0 for axis in range(len(shape))) for index in range(count))
    return [tensor.part(begin, shape) for begin in begins]
