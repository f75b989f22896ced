"""What every rank of test_sharding.py runs: each run under each sharding, in one job.

    python -m torch.distributed.run ... -m sharding_worker OUT_DIRECTORY RUN_DIR...

`shardings.json` in a run's directory lists [mode, shard_ranks, offload], and perhaps the ranks that divide experts.
Under each: three steps, with a checkpoint after two; after a restart, the last one again from that checkpoint, and then
from the one that the sharding before it wrote. Rank 0 writes the parameters and the losses of all three, and whether
the second has other bits.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from layouts_worker import filled_value, whole
from safetensors.torch import save_file

from hyperpod_ft.engines.interface import TrainingProgress
from hyperpod_ft.engines.ranks import Ranks, device_of, join_ranks
from hyperpod_ft.engines.torch.loop import TrainingLoop
from hyperpod_ft.engines.torch.lora import adapters
from hyperpod_ft.engines.torch.mesh import device_meshes
from hyperpod_ft.planning.layout import Sharding
from hyperpod_ft.runs.run import Run
from tests.tasks import task_of

SAVED, STEPS = 2, 3
Tensors = dict[str, torch.Tensor]


class Worker:
    """One rank, over all cases."""

    def __init__(self, world_size: int) -> None:
        self.ranks = join_ranks(world_size)
        self.attempts = 0

    @contextmanager
    def attempt(self, run: Run, sharding: Sharding, experts: int) -> Iterator[TrainingLoop]:
        """A new training loop, in a process group of its own, as after a restart."""
        self.attempts += 1
        store = dist.PrefixStore(str(self.attempts), self.ranks.store)
        ranks = Ranks(self.ranks.rank, self.ranks.world_size, self.ranks.local_rank, store)
        device = device_of("local", ranks.local_rank)
        degrees = replace(run.plan.degrees, expert_parallel=experts)
        with device_meshes(device, ranks, degrees, sharding.shard_ranks) as meshes:
            yield TrainingLoop(task_of(run, sharding), ranks, device, meshes)

    def case(self, run: Run, sharding: Sharding, experts: int) -> Tensors:
        previous = run.paths.directory / "previous"
        with self.attempt(run, sharding, experts) as loop:
            losses = [loop.step(step, []).loss for step in range(1, SAVED + 1)]
            if self.ranks.is_rank_0 and run.paths.checkpoint(SAVED).exists():
                run.paths.checkpoints.rename(previous)
            loop.state.save(TrainingProgress(step=SAVED), last=False, wanted=True)
            losses += [loop.step(step, []).loss for step in range(SAVED + 1, STEPS + 1)]
            loop.trained_weights.check_replicas(STEPS)
            straight = result(loop, losses)
        with self.attempt(run, sharding, experts) as loop:
            again = resumed(loop)
            again["loss"] = torch.cat([straight["loss"][:SAVED], again["loss"]])
            other_bits = [name for name, tensor in straight.items() if not torch.equal(tensor, again[name])]
            tensors = {"other_bits": torch.tensor([float(len(other_bits))])} | named("straight", straight)
            dist.barrier()
            if previous.exists():
                dist.barrier()  # all have seen it
                if self.ranks.is_rank_0:
                    own = run.paths.checkpoints.rename(run.paths.directory / "own")
                    previous.rename(run.paths.checkpoints)
                dist.barrier()
                ranks = loop.state._ranks  # a store has what each occasion found once
                loop.state._ranks = replace(ranks, store=dist.PrefixStore("switched", ranks.store))
                tensors |= named("switched", resumed(loop))
                dist.barrier()
                if self.ranks.is_rank_0:
                    shutil.rmtree(run.paths.checkpoints)
                    own.rename(run.paths.checkpoints)
        return tensors


def resumed(loop: TrainingLoop) -> Tensors:
    """The result of the last step, from the checkpoint on disk."""
    assert loop.state.resume(loop.total_steps).step == SAVED
    return result(loop, [loop.step(step, []).loss for step in range(SAVED + 1, STEPS + 1)])


def result(loop: TrainingLoop, losses: list[float]) -> Tensors:
    loss = torch.tensor(losses, dtype=torch.float64)
    masters = {f"parameter.{name}": whole(master) for name, master in loop.trained_weights.state().items()}
    return {"loss": loss} | masters


def named(prefix: str, tensors: Tensors) -> Tensors:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def main() -> None:
    out, runs = Path(sys.argv[1]), [Run.open(Path(argument)) for argument in sys.argv[2:]]
    adapters.initial_value = filled_value
    worker = Worker(runs[0].plan.degrees.world_size)
    for run in runs:
        for case in json.loads((run.paths.directory / "shardings.json").read_text()):
            mode, shard_ranks, offload, *experts = case
            tensors = worker.case(run, Sharding(mode, shard_ranks, offload), *(experts or (1,)))
            if worker.ranks.is_rank_0:
                save_file(tensors, out / f"{run.config.name}-{'-'.join(map(str, case))}.safetensors")


if __name__ == "__main__":
    main()
