"""One rank of a job that saves torch.distributed.checkpoints, each tensor sharded as told; see tiny_checkpoints."""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor


def main(rank: int, world_size: int, work: Path) -> None:
    dist.init_process_group("gloo", f"file://{work / 'rendezvous'}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    for job in json.loads((work / "jobs.json").read_text()):
        dims: dict[str, int | None] = job["dims"]

        def placed(name: str, dims: dict[str, int | None] = dims) -> list[Placement]:
            dim = dims.get(name)
            return [Replicate() if dim is None else Shard(dim)]

        tensors = load_file(job["whole"])
        model = {name: distribute_tensor(tensor, mesh, placed(name)) for name, tensor in tensors.items()}
        moments = {name: {"exp_avg": tensor * 2} for name, tensor in model.items()}
        dcp.save({"model": model, "optimizer": moments}, storage_writer=dcp.FileSystemWriter(job["target"]))
    dist.barrier()
    # gloo's tear-down sometimes aborts a process that has finished
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
