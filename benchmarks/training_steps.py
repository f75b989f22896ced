"""Runs the steps of a prepared run with engine torch and writes how long they take: the kit's part of `training`.

python -m benchmarks.training_steps RUN_DIRECTORY WARM_UP OUTPUT
"""

import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

from hyperpod_ft.engines.ranks import device_of, join_ranks
from hyperpod_ft.engines.torch import loop
from hyperpod_ft.engines.torch.mesh import device_meshes
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages.train import plan_layout, training_task


def main() -> None:
    directory, warm_up, output = sys.argv[1:]
    run = Run.open(Path(directory))
    memory = Memory()
    ranks = join_ranks(1)
    device = device_of(run.config.cluster.instance_type, ranks.local_rank)
    layout = plan_layout(run)
    with device_meshes(device, ranks, layout.degrees, layout.sharding.shard_ranks) as meshes:
        training = loop.TrainingLoop(training_task(run, layout), ranks, device, meshes)
        training.add_reference()
        cpu, wall, losses = [time.process_time()], [time.perf_counter()], []
        for number in range(1, training.total_steps + 1):
            losses.append(training.step(number, []).loss)
            if device.type != "cpu":
                torch.accelerator.synchronize()
            cpu.append(time.process_time())
            wall.append(time.perf_counter())
        seconds = _median_difference(wall, int(warm_up))
        facts = {
            "step_cpu": _median_difference(cpu, int(warm_up)),
            "step_seconds": seconds,
            "all_steps_cpu": cpu[-1] - cpu[0],
            "mfu": training.throughput.rates(1, seconds).mfu or 0.0,
            "beyond_imports": torch.accelerator.max_memory_allocated()
            if device.type != "cpu"
            else memory.peak_beyond_start(),
            "first_loss": losses[0],
            "last_loss": losses[-1],
        }
    Path(output).write_text(json.dumps(facts), encoding="utf-8")


def _median_difference(ends: list[float], warm_up: int) -> float:
    return statistics.median([after - before for before, after in itertools.pairwise(ends)][warm_up:])


class Memory:
    """Bytes of resident memory: what the process needs beyond its imports."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts again from now
        self._start = _status("VmRSS")

    def peak_beyond_start(self) -> int:
        return _status("VmHWM") - self._start


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as stage train does: gloo's threads may abort the process at its exit
