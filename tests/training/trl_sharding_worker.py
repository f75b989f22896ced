"""What every rank of test_trl.py and test_trl_sharding.py runs to shard on CPUs, which accelerate refuses.

    python -m forking_torchrun ... -m trl_sharding_worker MODE RUN_DIR [MODE RUN_DIR ...]

Trains one run after another to its end with sharding MODE over both ranks; or all of them `replicated`.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch.distributed import PrefixStore

from hyperpod_ft.engines.ranks import Ranks, join_ranks
from hyperpod_ft.engines.trl.loop import train
from hyperpod_ft.planning.layout import Sharding
from hyperpod_ft.runs.run import Run
from tests.tasks import task_of


def use_cpus(state: PartialState) -> None:
    state.device = torch.device("cpu")


def train_once(mode: str, run: Run, ranks: Ranks) -> None:
    """As if in a process of its own."""
    shard_ranks = 1 if mode == "replicated" else ranks.world_size
    with mock.patch.dict(os.environ):
        train(task_of(run, Sharding(mode, shard_ranks)), ranks)  # type: ignore[arg-type]
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def main() -> None:
    modes, runs = sys.argv[1::2], [Run.open(Path(directory)) for directory in sys.argv[2::2]]
    ranks = join_ranks(2)
    if "replicated" not in modes:
        PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
        PartialState.set_device = use_cpus
    for number, (mode, run) in enumerate(zip(modes, runs, strict=True)):
        train_once(mode, run, replace(ranks, store=PrefixStore(str(number), ranks.store)))


if __name__ == "__main__":
    main()
