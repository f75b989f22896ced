"""What every rank of test_moved_trainings.py runs: one training in many places, and the same in one.

    python -m torch.distributed.run ... -m elsewhere_worker OUT RUN_DIR...

`places.json` in a run's directory lists what `resume --set` would set for each place; each needs at most as many ranks
as the job has. For each run, rank 0 writes the losses of the first place's training (`unchanged`) and of one that goes
on in the next place every `STEPS` steps (`moved`), and after which of these moves a step in the place before, from what
the next one has saved at once, has other bits (`other_bits`).
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from hyperpod_ft.engines.interface import TrainingProgress
from hyperpod_ft.engines.ranks import Ranks, device_of, join_ranks
from hyperpod_ft.engines.torch.loop import TrainingLoop
from hyperpod_ft.engines.torch.mesh import device_meshes
from hyperpod_ft.launch.elsewhere import elsewhere
from hyperpod_ft.runs.run import Run
from tests.tasks import task_of

STEPS = 4
Tensors = dict[str, torch.Tensor]


class Worker:
    """One rank."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.attempts = ranks, 0

    def attempt(self, run: Run, directory: Path, work: Callable[[TrainingLoop], Tensors]) -> Tensors:
        """What `work` gives where the run is now, with checkpoints in `directory`; nothing on ranks that it lacks."""
        self.attempts += 1
        store, degrees, found = dist.PrefixStore(str(self.attempts), self.ranks.store), run.plan.degrees, Tensors()
        if self.ranks.rank < degrees.world_size:
            ranks = Ranks(self.ranks.rank, degrees.world_size, self.ranks.local_rank, store)
            task = replace(task_of(run), directory=directory)
            device = device_of("local", ranks.local_rank)
            with device_meshes(device, ranks, degrees, task.layout.sharding.shard_ranks) as meshes:
                found = work(TrainingLoop(task, ranks, device, meshes))
        self.ranks.gather(f"ended/{self.attempts}", None)
        return found

    def compare(self, run: Run) -> dict[str, list[float]]:
        places = [elsewhere(run, chosen) for chosen in json.loads((run.paths.directory / "places.json").read_text())]
        total = STEPS * len(places)
        unchanged = self.attempt(places[0], run.paths.directory / "unchanged", lambda loop: stepped(loop, 0, total))
        moved: list[float] = []
        other_bits: list[float] = []
        one_more: Tensors = {}
        directory, back = run.paths.directory / "moved", run.paths.directory / "back"
        for number, place in enumerate(places):
            begin, further = number * STEPS, Tensors()

            def go_on(loop: TrainingLoop, begin: int = begin, further: Tensors = further) -> Tensors:
                if begin:
                    assert loop.state.resume(loop.total_steps).step == begin
                    save(loop, begin, back / str(begin))
                found = stepped(loop, begin, STEPS)
                save(loop, begin + STEPS, directory)
                further.update(stepped(loop, begin + STEPS, 1))
                return found

            found = self.attempt(place, directory, go_on)
            moved += found.get("loss", torch.empty(0)).tolist()
            if begin:
                again = self.attempt(places[number - 1], back / str(begin), resumed)
                same = all(torch.equal(again[name], tensor) for name, tensor in one_more.items())
                if not all(self.ranks.gather(f"same/{self.attempts}", same)):
                    other_bits.append(begin)
            one_more = further
        return {"unchanged": unchanged.get("loss", torch.empty(0)).tolist(), "moved": moved, "other_bits": other_bits}


def stepped(loop: TrainingLoop, begin: int, steps: int) -> Tensors:
    """The losses of these steps, and this rank's part of the weights after them."""
    losses = [loop.step(step, []).loss for step in range(begin + 1, begin + steps + 1)]
    weights = loop.trained_weights
    own = {name: weights.master(name).clone() for name in weights.shards}
    return {"loss": torch.tensor(losses, dtype=torch.float64)} | own


def save(loop: TrainingLoop, step: int, directory: Path) -> None:
    task, ranks = loop.state._task, loop.state._checkpoints._ranks
    loop.state._checkpoints._task = replace(task, directory=directory)
    # a store has what each occasion found once
    loop.state._checkpoints._ranks = replace(ranks, store=dist.PrefixStore(directory.name, ranks.store))
    loop.state._checkpoints.save(
        loop.state._checkpoints._task.checkpoint(step), loop.state._tensors(), TrainingProgress(step=step)
    )


def resumed(loop: TrainingLoop) -> Tensors:
    return stepped(loop, loop.state.resume(loop.total_steps).step, 1)


def main() -> None:
    out, runs = Path(sys.argv[1]), [Run.open(Path(argument)) for argument in sys.argv[2:]]
    worker = Worker(join_ranks(4))
    found = {run.config.name: worker.compare(run) for run in runs}
    if worker.ranks.is_rank_0:
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
