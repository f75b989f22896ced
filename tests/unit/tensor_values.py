"""The values that a description of a tensor describes."""

import torch
from torch import Tensor

from hyperpod_ft.checkpoint.tensors.logical_tensor import DTYPE_OF_TORCH_NAME, LogicalTensor, Piece

TORCH_DTYPE: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name) for torch_name, name in DTYPE_OF_TORCH_NAME.items()
}


def gather(tensor: LogicalTensor) -> Tensor:
    """The values that a description describes."""
    whole = torch.empty(tensor.shape, dtype=TORCH_DTYPE[tensor.dtype])
    for piece in tensor.pieces:
        whole[_box(piece)] = values(piece, tensor.dtype)
    return whole


def different_copies(tensor: LogicalTensor) -> int:
    """How many replicas differ from the tensor."""
    whole = gather(tensor)
    return sum(not torch.equal(values(copy, tensor.dtype), whole[_box(copy)]) for copy in tensor.replicas)


def values(piece: Piece, dtype: str) -> Tensor:
    content = bytearray(piece.file.read_bytes())
    count = (len(content) - piece.offset) // TORCH_DTYPE[dtype].itemsize
    flat = torch.frombuffer(content, dtype=TORCH_DTYPE[dtype], offset=piece.offset, count=count)
    return flat.as_strided(piece.shape, piece.strides).clone()


def _box(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(piece.start, piece.shape, strict=True))
