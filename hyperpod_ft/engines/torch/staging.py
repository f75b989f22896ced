"""Copies of a checkpoint's tensors in host memory, from which a thread writes while training changes the originals."""

from collections.abc import Mapping
from typing import Any

import torch

from hyperpod_ft.engines.torch.sharding.pieces import Pieces


class Stager:
    """Copies what this rank saves, into memory that it keeps for the next checkpoint.

    A rank's shard of a parameter is often a view of the whole: only the shard is copied, not the storage behind it.
    """

    def __init__(self, *, pinned: bool) -> None:
        """`pinned`: the tensors are on an accelerator, which copies into pinned memory without a copy in between."""
        self._pinned = pinned
        self._buffers: dict[tuple[tuple[str, ...], torch.dtype], torch.Tensor] = {}

    def stage(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state of nested dictionaries of tensors, copied to the CPU. The next call overwrites it."""
        staged: dict[str, Any] = self._staged(state, ())
        if self._pinned:
            torch.accelerator.synchronize()
        return staged

    @torch.no_grad()
    def _staged(self, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, Mapping):
            return {key: self._staged(inner, (*path, key)) for key, inner in value.items()}
        if isinstance(value, Pieces):
            # boxes of a rank never begin at the same element
            boxes = [(start, self._copy(values, (*path, str(start)))) for start, values in value.boxes]
            return Pieces(value.shape, value.dtype, torch.device("cpu"), boxes)
        return self._copy(value, path)

    def _copy(self, tensor: torch.Tensor, path: tuple[str, ...]) -> torch.Tensor:
        key = path, tensor.dtype
        if key not in self._buffers:
            self._buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self._pinned)
        return self._buffers[key].copy_(tensor, non_blocking=self._pinned)
