"""What every rank of test_trl.py runs to shard on CPUs, which accelerate does for accelerators alone.

    python -m forking_torchrun ... -m trl_sharding_worker MODE RUN_DIR

Trains the run to its end with sharding MODE over all ranks.
"""

import sys
from pathlib import Path

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from hyperpod_ft.engines.ranks import join_ranks
from hyperpod_ft.engines.trl.loop import train
from hyperpod_ft.planning.layout import Sharding
from hyperpod_ft.runs.run import Run
from tests.tasks import task_of


def use_cpus(state: PartialState) -> None:
    state.device = torch.device("cpu")


def main() -> None:
    mode, run = sys.argv[1], Run.open(Path(sys.argv[2]))
    ranks = join_ranks(run.plan.degrees.world_size)
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = use_cpus
    train(task_of(run, Sharding(mode, ranks.world_size)), ranks)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
