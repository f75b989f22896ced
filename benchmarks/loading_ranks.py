"""One rank of `benchmarks.loading`: loads a model as engine torch does, or as transformers does, and measures that.

python -m torch.distributed.run ... -m benchmarks.loading_ranks LOADER DTYPE MODEL_DIRECTORY OUTPUT_DIRECTORY
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hyperpod_ft.checkpoint.formats import pretrained
from hyperpod_ft.checkpoint.formats.located import locate
from hyperpod_ft.engines.torch.build import decoder_layers
from hyperpod_ft.engines.torch.loading import skeleton
from hyperpod_ft.engines.torch.sharding.shards import local, shards_of


def by_slices(directory: Path, dtype: torch.dtype, mesh: DeviceMesh) -> PreTrainedModel:
    """The engine's way: shard shapes, then read this rank's slices."""
    model = skeleton.build(directory, dtype, "sdpa")
    weights = locate(model, directory)
    shards = shards_of(dict(model.named_parameters()), mesh, {})
    _shard(model, mesh)
    skeleton.materialize(model, torch.device("cpu"))
    skeleton.fill(model, weights, shards)
    return model


def whole(directory: Path, dtype: torch.dtype, mesh: DeviceMesh) -> PreTrainedModel:
    """transformers' way: every rank loads the whole model, which FSDP then shards."""
    model = pretrained.load(directory, dtype, "sdpa")
    _shard(model, mesh)
    return model


LOADERS: dict[str, Callable[[Path, torch.dtype, DeviceMesh], PreTrainedModel]] = {"slices": by_slices, "whole": whole}


def main() -> None:
    loader, dtype, directory, output = sys.argv[1], getattr(torch, sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    # the modules of the family: an import too
    AutoModelForCausalLM._model_mapping[type(AutoConfig.from_pretrained(directory))]
    dist.barrier()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    start, cpu = time.perf_counter(), time.process_time()
    model = LOADERS[loader](directory, dtype, mesh)
    dist.barrier()
    facts = {
        "wall": time.perf_counter() - start,
        "cpu": time.process_time() - cpu,
        "peak": _status("VmHWM") - before,
        "held": sum(local(parameter.detach()).nbytes for parameter in model.parameters()),
        "whole": sum(parameter.nbytes for parameter in model.parameters()),
    }
    (output / f"{dist.get_rank()}.json").write_text(json.dumps(facts), encoding="utf-8")
    dist.barrier()
    # gloo's threads sometimes abort a process that ends in the ordinary way
    os._exit(0)


def _shard(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    if mesh.size() > 1:
        for layer in decoder_layers(model):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    main()
