"""The memory that tensors take, of one rank alone."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from hyperpod_ft.engines.torch.loop import TrainingLoop
from hyperpod_ft.engines.torch.mesh import Meshes, make_meshes
from hyperpod_ft.engines.torch.sharding.shards import Pieces
from hyperpod_ft.planning.layout import Degrees, Sharding


@contextmanager
def meshes_of(
    rank: int, sharding: Sharding, ranks: int, tensor_parallel: int = 1, expert_parallel: int = 1
) -> Iterator[Meshes]:
    """The meshes of this process as one of `ranks`; the others do not exist, and communication does nothing."""
    _clear_sharding_prop_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        degrees = Degrees(1, ranks, tensor_parallel, 1, expert_parallel=expert_parallel)
        yield make_meshes("cpu", degrees, sharding.shard_ranks)
    finally:
        dist.destroy_process_group()


def no_checkpoints(*_: object) -> SimpleNamespace:
    """In place of Checkpoints, which makes a group of the processes that do not exist."""
    return SimpleNamespace(volume=None)


def live_tensors() -> list[torch.Tensor]:
    """All that have memory of their own."""
    gc.collect()
    # those have others inside, or none: what was compiled before may have left some
    wrapped = DTensor | Pieces | FakeTensor | FunctionalTensor
    return [found for found in gc.get_objects() if isinstance(found, torch.Tensor) and not isinstance(found, wrapped)]


def live_bytes() -> int:
    """Of the storages of all tensors."""
    storages = (tensor.untyped_storage() for tensor in live_tensors())
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def peak_during(work: Callable[[], object]) -> int:
    """Bytes of all tensors at the peak of `work`, those from before included."""
    before = live_bytes()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    results = profile.profiler.kineto_results
    events = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    now = peak = before
    for _, size in events:
        now += size
        peak = max(peak, now)
    return peak


def bytes_on_host(loop: TrainingLoop) -> int:
    """Of what an accelerator would have in host memory: masters, their gradients, moments, and frozen weights."""
    if loop.task.layout.sharding.offload == "none":
        return 0
    masters = sum(loop.trained_weights.master(name).nbytes for name in loop.trained_weights.parameters)
    stored = [tensor for moments in loop.optimizer._moments.values() for tensor in moments.tensors().values()]
    frozen = 0
    if loop.task.layout.sharding.offload == "parameters":
        shards = [p for p in loop.model.module.parameters() if not p.requires_grad]
        frozen = sum(p.to_local().nbytes for p in shards)  # type: ignore[operator]
    return 2 * masters + frozen + sum(tensor.nbytes for tensor in stored)
