"""Runs the steps of a prepared run with its engine and writes how long they take: the kit's part of `training`.

python -m benchmarks.training_steps RUN_DIRECTORY WARM_UP OUTPUT
"""

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hyperpod_ft.engines.interface import TrainingTask
from hyperpod_ft.engines.ranks import Ranks, device_of, join_ranks
from hyperpod_ft.engines.torch import loop
from hyperpod_ft.engines.torch.mesh import device_meshes
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages.train import plan_layout, training_task

MfuOf = Callable[[float], float | None]  # by the seconds of a step


def main() -> None:
    directory, warm_up, output = sys.argv[1:]
    run = Run.open(Path(directory))
    memory = Memory()
    ranks = join_ranks(1)
    device = device_of(run.config.cluster.instance_type, ranks.local_rank)
    task = training_task(run, plan_layout(run))
    clock = Clock(device)
    losses, mfu = (_of_trl if run.config.engine == "trl" else _of_torch)(task, ranks, clock)
    seconds = _median_difference(clock.wall, int(warm_up))
    facts = {
        "step_cpu": _median_difference(clock.cpu, int(warm_up)),
        "step_seconds": seconds,
        "all_steps_cpu": clock.cpu[-1] - clock.cpu[0],
        "mfu": mfu(seconds) or 0.0,
        "beyond_imports": torch.accelerator.max_memory_allocated()
        if device.type != "cpu"
        else memory.peak_beyond_start(),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
    Path(output).write_text(json.dumps(facts), encoding="utf-8")


class Clock:
    """CPU seconds of the process, and seconds, before the first step and at the end of each."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cpu, self.wall = device, list[float](), list[float]()

    def read(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        self.cpu.append(time.process_time())
        self.wall.append(time.perf_counter())


def _of_torch(task: TrainingTask, ranks: Ranks, clock: Clock) -> tuple[list[float], MfuOf]:
    assert task.layout.own_attention, "stage certify has run"
    degrees, sharding = task.layout.degrees, task.layout.sharding
    with device_meshes(clock.device, ranks, degrees, sharding.shard_ranks) as meshes:
        training = loop.TrainingLoop(task, ranks, clock.device, meshes)
        training.add_reference()
        clock.read()
        losses = []
        for number in range(1, training.total_steps + 1):
            losses.append(training.step(number, []).loss)
            clock.read()
        return losses, lambda seconds: training.throughput.rates(1, seconds).mfu


def _of_trl(task: TrainingTask, ranks: Ranks, clock: Clock) -> tuple[list[float], MfuOf]:
    from hyperpod_ft.engines.trl import callback  # noqa: PLC0415 # TRL is not everywhere
    from hyperpod_ft.engines.trl import loop as trl_loop  # noqa: PLC0415

    class Follower(callback.StepsFollower):
        def on_train_begin(self, *args: Any, **passed: Any) -> None:
            super().on_train_begin(*args, **passed)
            clock.read()

        def on_log(self, *args: Any, **passed: Any) -> None:
            super().on_log(*args, **passed)
            if "loss" in passed["logs"]:
                clock.read()

    vars(trl_loop)["StepsFollower"] = Follower
    result = trl_loop.train(task, ranks)
    facts = result.facts
    per_second = facts["mfu"] and facts["mfu"] * facts["seconds"] / facts["steps"]
    return [facts["first_loss"], facts["final_loss"]], lambda seconds: per_second and per_second / seconds


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
