"""Where each tensor of a model is in its safetensors files, under the names and in the form that transformers gives it.

Model classes may name or arrange tensors differently from the published files: Mixtral's experts are one tensor in
the class and hundreds in the files. transformers keeps a table of such conversions; here each becomes byte ranges, so
that a rank still reads nothing but its own slice.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
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

from hyperpod_ft.checkpoint.adapters.experts import ExpertFiles
from hyperpod_ft.checkpoint.adapters.lora_config import ends_with
from hyperpod_ft.checkpoint.formats.safetensors_file import read_model
from hyperpod_ft.checkpoint.sharded.description import HeldPart
from hyperpod_ft.checkpoint.tensors.elements import ARITHMETIC
from hyperpod_ft.checkpoint.tensors.logical_tensor import DTYPE_BYTES, LogicalTensor, Piece
from hyperpod_ft.errors import UserError

_REMEDY = "make or download the model again"


def locate(model: PreTrainedModel, directory: Path) -> dict[str, LogicalTensor]:
    """The stored tensor of every parameter and persistent buffer of `model`, by its name in the model; reads no values.

    `model` may be on the meta device. Tied parameters have one stored tensor; if the files hold it under several
    names, the others are its replicas. Raises UserError when a file is damaged, a tensor is missing, has another shape
    or a dtype that cannot be computed with, or needs a conversion that this module lacks.
    """
    expected: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    stored = _converted(model, {tensor.name: tensor for tensor in read_model(directory)}, expected, directory)
    names_of: defaultdict[int, list[str]] = defaultdict(list)
    for name, value in expected.items():
        names_of[id(value)].append(name)
    if missing := sorted(names[0] for names in names_of.values() if not stored.keys() & set(names)):
        raise UserError(f"{directory}: {len(missing)} of the model's tensors are missing: {missing[0]}", _REMEDY)
    located: dict[str, LogicalTensor] = {}
    for names in names_of.values():
        first, *others = (stored[name] for name in names if name in stored)
        for tensor in (first, *others):
            _check(tensor, expected[names[0]], directory)
        if any(other.dtype != first.dtype for other in others):
            raise UserError(f"{directory}: tensor {first.name} is tied to one of another dtype", _REMEDY)
        whole = replace(first, replicas=tuple(piece for other in others for piece in other.pieces))
        located |= dict.fromkeys(names, whole)
    return located


def names_in_files(located: Mapping[str, LogicalTensor]) -> dict[str, str]:
    """The names in the files of tensors that transformers only renames, by their names in the model."""
    return {name: tensor.name for name, tensor in located.items() if tensor.name not in located}


def held_parts(
    model: PreTrainedModel, located: Mapping[str, LogicalTensor], directory: Path
) -> dict[str, tuple[HeldPart, ...]]:
    """What the files' tensors consist of that transformers arranges otherwise, by their names in the files.

    Nothing, for those that are not trained when all parameters are: buffers, what transformers itself freezes, and what
    its class does not have, such as layers that predict several tokens (`mtp`).
    """
    stored = read_model(directory)
    names = {tensor.name for tensor in stored}
    starts = sorted((str(tensor.pieces[0].file), tensor.pieces[0].offset, tensor) for tensor in stored if tensor.pieces)
    keys = [start[:2] for start in starts]
    parts: defaultdict[str, list[HeldPart]] = defaultdict(list)
    used = set()
    for holder, tensor in located.items():
        for piece in tensor.stored:
            *_, source = starts[bisect_right(keys, (str(piece.file), piece.offset)) - 1]
            used.add(source.name)
            if tensor.name not in names:
                parts[source.name].append(_held_part(holder, piece, source))
    values: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    left = [located[name].name for name, value in values.items() if not value.requires_grad]
    left += sorted(names - used)
    return dict.fromkeys(left, ()) | {name: tuple(found) for name, found in parts.items()}


def check_experts(located: Mapping[str, LogicalTensor], directory: Path, targets: Sequence[str]) -> None:
    """Raise UserError unless stage merge finds the files' tensors of these parameters of experts where they are.

    `targets`: ends of their names.
    """
    wanted = [name for name in located if any(ends_with(name, target) for target in targets)]
    stored = {tensor.name: tensor for tensor in read_model(directory)} if wanted else {}
    files = ExpertFiles({name: tensor.shape for name, tensor in stored.items()})
    for name in wanted:
        if len(located[name].shape) == 3 and _places(files.joined(name, stored)) != _places(located[name].pieces):
            raise UserError(
                f"lora.target_parameters: which tensors of the model's files {name} is, stage merge does not know",
                "leave it out: the files have these experts under names, or in a form, that it cannot merge",
            )


def _places(pieces: Iterable[Piece]) -> set[tuple[Any, ...]]:
    return {(piece.file, piece.offset, piece.start, piece.shape) for piece in pieces}


def _held_part(holder: str, piece: Piece, source: LogicalTensor) -> HeldPart:
    """Where a piece of the model's tensor `holder` is in the files' tensor that it is a box of."""
    (whole,) = source.pieces
    rest = (piece.offset - whole.offset) // DTYPE_BYTES[source.dtype]
    at, axes = [], []
    for stride in whole.strides:
        index, rest = divmod(rest, stride)
        at.append(index)
        # of several axes with this stride, all but one have length 1
        axes.append(max((n for n, own in enumerate(piece.strides) if own == stride), key=lambda n: piece.shape[n]))
    return HeldPart(tensor=holder, start=piece.start, shape=piece.shape, axes=tuple(axes), at=tuple(at))


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
