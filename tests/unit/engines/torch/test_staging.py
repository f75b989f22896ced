"""Staging copies the parts that a rank saves, not the storages that they are views of, into memory that it keeps."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hyperpod_ft.engines.torch.staging import Stager


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    dist.destroy_process_group()


def tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, dict):
        return [tensor for inner in state.values() for tensor in tensors(inner)]
    return [state.to_local() if isinstance(state, DTensor) else state]


def test_parts_alone_are_copied(mesh: DeviceMesh) -> None:
    whole = torch.arange(60.0).view(10, 6)
    part = DTensor.from_local(whole[5:], mesh, [Shard(0)], run_check=False, shape=torch.Size([10, 6]), stride=(6, 1))
    state = {"model": {"weight": part, "norm": whole[0]}, "random": {"1": {"cpu": torch.get_rng_state()}}}
    staged = Stager(pinned=False).stage(state)
    copy = staged["model"]["weight"]
    assert (copy.shape, copy.placements, copy.device_mesh) == (part.shape, part.placements, mesh)
    for found, original in zip(tensors(staged), tensors(state), strict=True):
        assert torch.equal(found, original)
        assert found.untyped_storage().nbytes() == original.nbytes
        assert found.data_ptr() != original.data_ptr()


def test_the_next_checkpoint_uses_the_same_memory() -> None:
    stager, weight = Stager(pinned=False), torch.zeros(3, 2)
    first = stager.stage({"model": {"weight": weight}})["model"]["weight"]
    weight += 1
    assert not first.any(), "training does not change what is being written"
    again = stager.stage({"model": {"weight": weight}})["model"]["weight"]
    assert again.data_ptr() == first.data_ptr()
    assert again.all()
    rounded = stager.stage({"model": {"weight": weight.bfloat16()}})["model"]["weight"]
    assert rounded.dtype == torch.bfloat16
    assert again.all()
