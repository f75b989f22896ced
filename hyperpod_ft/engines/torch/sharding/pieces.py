"""Tensors of which a rank has some boxes, as checkpoints save and load them."""

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Box = tuple[tuple[int, ...], torch.Tensor]
"""Some elements of a tensor: where they begin in the whole, and their values."""


class Pieces(torch.Tensor):
    """A tensor of which this rank has some boxes, as torch.distributed.checkpoint saves and loads it.

    The three methods are its protocol (torch/distributed/_checkpointable.py). Unlike a DTensor, the boxes of a rank can
    lie anywhere.
    """

    boxes: list[Box]

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device, boxes: list[Box]) -> "Pieces":
        made: Pieces = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.boxes = boxes
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise TypeError(f"{func} is not defined for a part of a tensor")

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(start), sizes=values.shape)
            for start, values in self.boxes
            if values.numel()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(values for start, values in self.boxes if torch.Size(start) == index.offset)
