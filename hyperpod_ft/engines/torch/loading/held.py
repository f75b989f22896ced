"""What the tensors of a model's files are in a checkpoint, and what stage merge will take them for."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hyperpod_ft.checkpoint.adapters.experts import ExpertFiles
from hyperpod_ft.checkpoint.adapters.live_names import with_live_names
from hyperpod_ft.checkpoint.adapters.lora_config import ends_with
from hyperpod_ft.checkpoint.formats import image_text
from hyperpod_ft.checkpoint.formats.safetensors_file import read_model
from hyperpod_ft.checkpoint.sharded.description import HeldPart
from hyperpod_ft.checkpoint.tensors.logical_tensor import DTYPE_BYTES, LogicalTensor, Piece
from hyperpod_ft.errors import UserError


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
    if not wanted:
        return
    whole = {name: name for name in located} | image_text.names_in_whole(directory, located)
    modules = [whole[name].removesuffix(".weight") for name in located if name.endswith(".weight")]
    stored = with_live_names(modules, {tensor.name: tensor for tensor in read_model(directory)})
    files = ExpertFiles({name: tensor.shape for name, tensor in stored.items()})
    for name in wanted:
        known = {
            (*_place(piece), (one.expert or 0, one.row + piece.start[-2], 0))
            for one in files.slices(whole[name])[0]
            for piece in stored[one.name].pieces
        }
        if len(located[name].shape) == 3 and known != {(*_place(one), one.start) for one in located[name].pieces}:
            raise UserError(
                f"lora.target_parameters: which tensors of the model's files {name} is, stage merge does not know",
                "leave it out: the files have these experts under names, or in a form, that it cannot merge",
            )


def _place(piece: Piece) -> tuple[Any, ...]:
    """Where a piece is in the files, and its rows and columns."""
    return piece.file, piece.offset, piece.shape[-2:]


def _held_part(holder: str, piece: Piece, source: LogicalTensor) -> HeldPart:
    """Where a piece of the model's tensor `holder` is in the files' tensor that it is a box of."""
    (whole,) = source.pieces
    rest = (piece.offset - whole.offset) // DTYPE_BYTES[source.dtype]
    at, axes = [], []
    for length, stride in zip(whole.shape, whole.strides, strict=True):
        index, rest = divmod(rest, stride)
        at.append(index)
        # of several axes with this stride, all but one have length 1
        of_stride = [n for n, own in enumerate(piece.strides) if own == stride]
        axes.append((min if length == 1 else max)(of_stride, key=lambda n: piece.shape[n]))
    return HeldPart(tensor=holder, start=piece.start, shape=piece.shape, axes=tuple(axes), at=tuple(at))
