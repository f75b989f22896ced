"""What every rank of a measurement of memory runs: each run under each sharding.

    python -m torch.distributed.run ... -m memory_worker OUT_DIRECTORY RUN_DIR...

The buckets are smaller, in proportion to the model. Rank 0 writes the bytes of all tensors at the peak of a step, for
each rank.
Tensors that an accelerator would have in host memory do not count.
"""

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from sharding_worker import Worker
from torch.distributed.tensor import DTensor

from hyperpod_ft.engines.torch.loop import TrainingLoop
from hyperpod_ft.engines.torch.sharding import trained_weights
from hyperpod_ft.engines.torch.sharding.pieces import Pieces
from hyperpod_ft.planning.torch.sharding import Sharding
from hyperpod_ft.runs.run import Run

BUCKET_BYTES = 1 << 20
STEPS = 4


def live_bytes() -> int:
    """Of the storages of all tensors."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor) and not isinstance(found, DTensor | Pieces):  # those have others inside
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def peak_bytes(loop: TrainingLoop, step: int) -> int:
    # what only the collector of cycles would free is freed at once, as most of it is in longer runs
    gc.set_threshold(50)
    return peak_during(lambda: loop.step(step, []))


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


def measure(worker: Worker, run: Run, sharding: Sharding) -> int:
    others = live_bytes()
    with worker.attempt(run, sharding) as loop:
        loop.step(1, [])
        # the least of some steps: gloo copies what it reduces in threads of its own, which may let go of it late
        peak = min(peak_bytes(loop, step) for step in range(2, STEPS + 1))
        return peak - others - host_bytes(loop)


def main() -> None:
    out, runs = Path(sys.argv[1]), [Run.open(Path(argument)) for argument in sys.argv[2:]]
    trained_weights.BUCKET_BYTES = BUCKET_BYTES
    worker = Worker(runs[0].plan.degrees.world_size)
    for run in runs:
        for mode, shard_ranks, offload in json.loads((run.directory / "shardings.json").read_text()):
            peak = measure(worker, run, Sharding(mode, shard_ranks, offload))
            peaks = worker.processes.gather(f"{run.config.name}/{mode}/{offload}", peak)
            if worker.processes.leads:
                tensors = {"peak": torch.tensor(peaks, dtype=torch.float64)}
                save_file(tensors, out / f"{run.config.name}-{mode}-{shard_ranks}-{offload}.safetensors")


def host_bytes(loop: TrainingLoop) -> int:
    """Of the masters, their gradients and moments, if they are in host memory."""
    if loop.sharding.offload == "none":
        return 0
    masters = sum(loop.trained_weights.master(name).nbytes for name in loop.trained_weights.parameters)
    stored = [tensor for moments in loop.optimizer._moments.values() for tensor in moments.tensors().values()]
    frozen = 0
    if loop.sharding.offload == "parameters":
        shards = [p for p in loop.model.module.parameters() if not p.requires_grad]
        frozen = sum(p.to_local().nbytes for p in shards)  # type: ignore[operator]
    return 2 * masters + frozen + sum(tensor.nbytes for tensor in stored)


if __name__ == "__main__":
    main()
