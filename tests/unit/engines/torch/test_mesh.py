"""Process groups of the device mesh."""

import multiprocessing
from pathlib import Path

import torch
from torch._C._distributed_c10d import FileStore

from hyperpod_ft.engines.processes import COLLECTIVE_TIMEOUT, Processes
from hyperpod_ft.engines.torch.mesh import backend, device_mesh
from hyperpod_ft.planning.degrees import Degrees


def test_tensors_in_host_memory_have_a_backend() -> None:
    assert backend(torch.device("cpu")) == "gloo"
    assert backend(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"


def timeouts(rank: int, store: Path) -> set[float]:
    degrees = Degrees(nodes=1, ranks_per_node=2, tensor_parallel=2, pipeline_parallel=1)
    with device_mesh(torch.device("cpu"), Processes(rank, 2, rank, FileStore(str(store), 2)), degrees) as mesh:
        groups = [mesh.get_group(axis) for axis in ("dp_replicate", "dp_shard", "tp", "dp")]
        return {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}


def test_every_group_waits_as_long(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        found = pool.starmap_async(timeouts, [(rank, tmp_path / "store") for rank in range(2)], chunksize=1).get(60)
    assert found == [{COLLECTIVE_TIMEOUT.total_seconds()}] * 2
