"""Process groups of the device mesh, and what ranks share of a node."""

import multiprocessing
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.testing._internal.distributed.fake_pg import FakeStore

from hyperpod_ft.engines.ranks import COLLECTIVE_TIMEOUT, Ranks
from hyperpod_ft.engines.torch import devices
from hyperpod_ft.engines.torch.mesh import backend, device_meshes, make_meshes
from hyperpod_ft.planning.layout import Degrees


def test_tensors_in_host_memory_have_a_backend() -> None:
    assert backend(torch.device("cpu")) == "gloo"
    assert backend(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system has no affinity")
def test_ranks_share_the_cores_that_they_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(96)))
    assert [devices.host_threads(ranks) for ranks in (1, 8, 200)] == [96, 12, 1]


def timeouts(rank: int, store: Path) -> set[float]:
    degrees = Degrees(nodes=1, ranks_per_node=2, tensor_parallel=2, pipeline_parallel=1)
    with device_meshes(torch.device("cpu"), Ranks(rank, 2, rank, FileStore(str(store), 2)), degrees) as meshes:
        groups = [*meshes.weights.get_all_groups(), *meshes.tokens.get_all_groups()]
        return {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}


def test_every_group_waits_as_long(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        found = pool.starmap_async(timeouts, [(rank, tmp_path / "store") for rank in range(2)], chunksize=1).get(300)
    assert found == [{COLLECTIVE_TIMEOUT.total_seconds()}] * 2


def ranks_of(rank: int, degrees: Degrees, shard_ranks: int) -> dict[str, list[int]]:
    """The ranks that this rank meets along each axis."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=degrees.world_size)
    try:
        meshes = make_meshes("cpu", degrees, shard_ranks)
        found = {
            axis: mesh[axis].mesh.tolist()
            for mesh in (meshes.weights, meshes.tokens)
            for axis in mesh.mesh_dim_names or ()
        }
        experts = meshes.experts
        of_experts = (
            {f"experts {axis}": experts[axis].mesh.tolist() for axis in experts.mesh_dim_names or ()} if experts else {}
        )
        return found | of_experts
    finally:
        dist.destroy_process_group()


def test_neighbors_share_layers_then_rows_then_state() -> None:
    degrees = Degrees(nodes=2, ranks_per_node=16, tensor_parallel=2, pipeline_parallel=2, context_parallel=2)
    assert (degrees.data_parallel, degrees.weight_replicas) == (4, 8)
    assert ranks_of(0, degrees, shard_ranks=4) == {
        "tp": [0, 1],
        "cp": [0, 2],
        "dp": [0, 4, 8, 12],
        "dp_shard": [0, 2, 4, 6],
        "dp_replicate": [0, 8],
        "pp": [0, 16],
    }
    assert ranks_of(31, degrees, shard_ranks=4)["cp"] == [29, 31]


def test_neighbors_share_experts_and_the_others_their_state() -> None:
    degrees = Degrees(nodes=2, ranks_per_node=8, tensor_parallel=1, pipeline_parallel=1, expert_parallel=4)
    assert str(degrees) == "dp 16 x tp 1, ep 4"
    found = ranks_of(5, degrees, shard_ranks=8)
    assert (found["dp_shard"], found["dp_replicate"]) == ([*range(8)], [5, 13])
    assert found["experts ep"] == [4, 5, 6, 7]
    assert (found["experts dp_shard"], found["experts dp_replicate"]) == ([1, 5], [5, 13])
    found = ranks_of(5, degrees, shard_ranks=2)
    assert (found["experts dp_shard"], found["experts dp_replicate"]) == ([5], [1, 5, 9, 13])
