"""One rank of `benchmarks.pipeline`: trains prepared runs, and writes how long each pass through a stage took.

python -m torch.distributed.run ... -m benchmarks.pipeline_ranks WARM_UP OUTPUT_DIRECTORY RUN_DIRECTORY...
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hyperpod_ft.engines.ranks import Ranks, device_of, join_ranks
from hyperpod_ft.engines.torch import loop
from hyperpod_ft.engines.torch.mesh import device_meshes
from hyperpod_ft.engines.torch.pipeline import ScheduledStage
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages.train import plan_layout, training_task

Pass = tuple[str, int, int, float]
"""F or B, stage, micro batch, CPU seconds: what else the machine does counts less than in elapsed time."""


def main() -> None:
    warm_up, output, *directories = sys.argv[1:]
    torch.set_num_threads(1)
    passes: list[Pass] = []
    for name, kind in (("forward_one_chunk", "F"), ("backward_one_chunk", "B")):
        setattr(ScheduledStage, name, _timed(getattr(ScheduledStage, name), kind, passes))
    found = []
    for index, directory in enumerate(directories):
        run = Run.open(Path(directory))
        ranks = join_ranks(run.plan.degrees.world_size)
        ranks = replace(ranks, store=dist.PrefixStore(str(index), ranks.store))
        found.append(_steps(run, ranks, passes)[int(warm_up) :])
    (Path(output) / f"{ranks.rank}.json").write_text(json.dumps(found), encoding="utf-8")


def _steps(run: Run, ranks: Ranks, passes: list[Pass]) -> list[list[Pass]]:
    device = device_of("local", ranks.local_rank)
    layout = plan_layout(run)
    steps = []
    with device_meshes(device, ranks, layout.degrees, layout.sharding.shard_ranks) as meshes:
        training = loop.TrainingLoop(training_task(run, layout), ranks, device, meshes)
        for number in range(1, training.total_steps + 1):
            passes.clear()
            training.step(number, [])
            steps.append([*passes])
    return steps


def _timed(method: Callable[..., Any], kind: str, passes: list[Pass]) -> Callable[..., Any]:
    def call(stage: ScheduledStage, number: int, *args: Any, **kwargs: Any) -> Any:
        begun = time.thread_time()
        result = method(stage, number, *args, **kwargs)
        passes.append((kind, stage.stage_index, number, time.thread_time() - begun))
        return result

    return call


if __name__ == "__main__":
    main()
