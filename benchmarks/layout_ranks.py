"""One rank of `benchmarks.layouts`: trains prepared runs one after another, and writes what a step of each costs.

python -m torch.distributed.run ... -m benchmarks.layout_ranks OUTPUT_DIRECTORY RUN_DIRECTORY...

In the last step the bytes that this rank sends are counted, which takes time; the first ones warm up.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.sent_bytes import SentBytes
from hyperpod_ft.engines.ranks import Ranks, device_of, join_ranks
from hyperpod_ft.engines.torch import loop
from hyperpod_ft.engines.torch.mesh import device_meshes
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages.train import plan_layout, training_task

WARM_UP = 2


def main() -> None:
    output, *directories = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    found = []
    for number, directory in enumerate(directories):
        run = Run.open(directory)
        ranks = join_ranks(run.plan.degrees.world_size)
        store = dist.PrefixStore(str(number), ranks.store)
        found.append(measure(run, Ranks(ranks.rank, ranks.world_size, ranks.local_rank, store)))
    (output / f"{ranks.rank}.json").write_text(json.dumps(found), encoding="utf-8")


def measure(run: Run, ranks: Ranks) -> dict[str, Any]:
    """Medians of a step's `cpu` and `wall` seconds, unless it is the first; `sent`: bytes by kind; the last `loss`."""
    device = device_of("local", ranks.local_rank)
    layout = plan_layout(run)
    with device_meshes(device, ranks, layout.degrees, layout.sharding.shard_ranks) as meshes:
        training = loop.TrainingLoop(training_task(run, layout), ranks, device, meshes)
        cpu, wall = [], []
        for number in range(1, training.total_steps):
            begun = time.process_time(), time.perf_counter()
            training.step(number, [])
            cpu.append(time.process_time() - begun[0])
            wall.append(time.perf_counter() - begun[1])
        with SentBytes() as sent:
            last = training.step(training.total_steps, [])
        timed = slice(min(WARM_UP, len(cpu) - 1), None)
        return {
            "cpu": statistics.median(cpu[timed]),
            "wall": statistics.median(wall[timed]),
            "sent": dict(sent.by_kind),
            "loss": last.loss,
        }


if __name__ == "__main__":
    main()
