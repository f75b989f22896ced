"""What every rank of test_pipeline_parallel.py runs: several runs in turn, each with its own mesh of the same ranks.

    python -m forking_torchrun ... -m pipeline_worker STEPS OUT_DIRECTORY RUN_DIR...

`shardings.json` in a run's directory lists [mode, shard_ranks, offload]. Under each: the gradients of the first step,
then, if any, STEPS steps and the validation loss. Rank 0 writes, whole, these gradients, the parameters, losses and
norms.
"""

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layouts_worker import filled_value
from safetensors.torch import save_file

from hyperpod_ft.engines.ranks import Ranks, device_of, join_ranks
from hyperpod_ft.engines.torch.loop import TrainingLoop
from hyperpod_ft.engines.torch.lora import adapters
from hyperpod_ft.engines.torch.mesh import device_meshes
from hyperpod_ft.engines.torch.model import activations
from hyperpod_ft.engines.torch.sharding.shards import Box
from hyperpod_ft.planning.layout import Sharding
from hyperpod_ft.runs.run import Run
from tests.tasks import task_of


def measure(run: Run, ranks: Ranks, sharding: Sharding, count: int, out: Path) -> None:
    device = device_of("local", ranks.local_rank)
    with device_meshes(device, ranks, run.plan.degrees, sharding.shard_ranks) as meshes:
        loop = TrainingLoop(task_of(run, sharding), ranks, device, meshes)
        shards, held = loop.trained_weights.shards, {}
        means, _ = loop.forward_backward(1)
        loss = means[0] / run.plan.degrees.tensor_parallel
        dist.all_reduce(loss)
        for names in loop.trained_weights.buckets:
            for name, gradient in zip(names, loop.trained_weights.take_gradients(names), strict=True):
                held[f"gradient.{name}"] = shards[name].shape, shards[name].boxes(gradient.clone())
        steps = [loop.step(step, []) for step in range(1, count + 1)]
        loop.trained_weights.check_replicas(count)
        for name in loop.trained_weights.parameters:
            held[f"parameter.{name}"] = shards[name].shape, shards[name].boxes(loop.trained_weights.master(name))
        tensors = whole(held)
        tensors["loss"] = torch.tensor([step.loss for step in steps] or [loss.item()], dtype=torch.float64)
        if steps:
            tensors["norm"] = torch.tensor([step.grad_norm for step in steps], dtype=torch.float64)
            assert loop.validation is not None
            sums = loop.pipeline.sums if loop.pipeline else partial(loop.objective.sums, loop.model.module)
            validation = loop.validation.means(loop.model.module, lambda batch: sums(loop.inputs(batch)))
            tensors["validation"] = torch.tensor(validation.overall)
        if ranks.is_rank_0:
            save_file(tensors, out / f"{run.config.name}-{sharding.mode}-{sharding.offload}.safetensors")


def whole(held: Mapping[str, tuple[torch.Size, list[Box]]]) -> dict[str, torch.Tensor]:
    """On rank 0, what all ranks have of tensors, given by shape and boxes; copies must be the same bits. Collective."""
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    # arrays: tensors take longer to be written and read
    boxes = {name: (shape, [(start, values.numpy()) for start, values in of]) for name, (shape, of) in held.items()}
    dist.gather_object(boxes, gathered)
    result: dict[str, torch.Tensor] = {}
    for name, (shape, of) in (item for one in gathered or () for item in one.items()):
        tensor = result.setdefault(name, torch.full(shape, torch.nan))
        for start, array in of:
            values = torch.from_numpy(array)
            place = tensor[tuple(slice(a, a + n) for a, n in zip(start, values.shape, strict=True))]
            assert place.isnan().all() or torch.equal(place, values), f"{name} differs between ranks"
            place.copy_(values)
    return result


def main() -> None:
    steps, out, directories = int(sys.argv[1]), Path(sys.argv[2]), [Path(argument) for argument in sys.argv[3:]]
    adapters.initial_value = filled_value
    offload = activations.offload_layers
    # small models have no tensors of a size that would move
    activations.offload_layers = lambda layers, device: offload(layers, device, at_least=1)
    for index, directory in enumerate(directories):
        run = Run.open(directory)
        for number, case in enumerate(json.loads((directory / "shardings.json").read_text())):
            ranks = join_ranks(run.plan.degrees.world_size)
            store = dist.PrefixStore(f"{index}/{number}", ranks.store)
            own = Ranks(ranks.rank, ranks.world_size, ranks.local_rank, store)
            measure(run, own, Sharding(*case), steps, out)


if __name__ == "__main__":
    main()
