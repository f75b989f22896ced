"""Copies of a checkpoint's tensors in host memory, from which a thread writes while training changes the originals."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


class Stager:
    """Copies what this rank saves, into memory that it keeps for the next checkpoint.

    A rank's part of a parameter is often a view of the whole: only the part is copied, not the storage behind it.
    """

    def __init__(self, *, pinned: bool) -> None:
        """`pinned`: the tensors are on an accelerator, which copies into pinned memory without a copy in between."""
        self._pinned = pinned
        self._copies: dict[tuple[tuple[str, ...], torch.dtype], torch.Tensor] = {}

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
        if isinstance(value, DTensor):
            return DTensor.from_local(
                self._copy(value.to_local(), path),
                _on_cpu(value.device_mesh),
                value.placements,
                run_check=False,
                shape=value.shape,
                stride=value.stride(),
            )
        return self._copy(value, path)

    def _copy(self, tensor: torch.Tensor, path: tuple[str, ...]) -> torch.Tensor:
        key = path, tensor.dtype
        if key not in self._copies:
            self._copies[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self._pinned)
        return self._copies[key].copy_(tensor, non_blocking=self._pinned)


def _on_cpu(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks and process groups, for tensors on the CPU."""
    if mesh.device_type == "cpu":
        return mesh
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    return DeviceMesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
