"""What every rank of test_compiled.py and others runs: the training of several runs, one after another.

    python -m forking_torchrun ... -m compiled_worker RUN_DIR...

Layers are traced as for the compiler, without its minutes.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from hyperpod_ft.engines.ranks import Ranks, join_ranks
from hyperpod_ft.engines.torch.loop import train
from hyperpod_ft.runs.run import Run
from tests.tasks import task_of

compile_with = torch.compile


def trace(function: Any, *, backend: str, dynamic: bool, fullgraph: bool) -> Any:
    assert backend == "inductor"
    return compile_with(function, backend="aot_eager", dynamic=dynamic, fullgraph=fullgraph)


def main() -> None:
    torch.compile = trace
    for index, directory in enumerate(map(Path, sys.argv[1:])):
        torch._dynamo.reset()
        counters.clear()
        run = Run.open(directory)
        ranks = join_ranks(run.plan.degrees.world_size)
        store = dist.PrefixStore(str(index), ranks.store)
        train(task_of(run), Ranks(ranks.rank, ranks.world_size, ranks.local_rank, store))
        assert bool(counters["stats"]["unique_graphs"]) == bool(run.config.training.compile), counters


if __name__ == "__main__":
    main()
