"""What every rank of test_layouts.py runs: several runs one after another, each with its own mesh of the same ranks.

    python -m forking_torchrun ... -m layouts_worker STEPS OUT_DIRECTORY RUN_DIR...

For each run: STEPS optimizer steps, then one forward and backward pass. Rank 0 writes, whole, the gradients of
that pass, the parameters before it, and the losses of all passes. In the steps, the gradients of norms that each
tp rank computes whole differ a little, as they may on GPUs.
"""

import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from hyperpod_ft.engines.ranks import Ranks, device_of, join_ranks
from hyperpod_ft.engines.torch import devices
from hyperpod_ft.engines.torch.loop import TrainingLoop
from hyperpod_ft.engines.torch.lora import adapters
from hyperpod_ft.engines.torch.mesh import device_meshes
from hyperpod_ft.engines.torch.model import activations, loss
from hyperpod_ft.engines.torch.sharding.shards import Pieces
from hyperpod_ft.runs.run import Run
from tests.tasks import task_of

original = adapters.initial_value


def filled_value(name: str, shape: torch.Size, seed: int) -> torch.Tensor | None:
    """The engine's initial factor, but random where that is zero, with which lora_A would have no gradient."""
    if "lora_B" not in name:
        return original(name, shape, seed)
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) * 0.1


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """What the ranks have of a tensor, together. Collective."""
    if not isinstance(tensor, Pieces):
        # clone: two views of one tensor cannot be saved
        return tensor.detach().clone().contiguous()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, tensor.boxes)
    result = torch.full(tensor.shape, torch.nan, dtype=tensor.dtype)
    for start, values in (box for boxes in gathered for box in boxes):
        result[tuple(slice(a, a + n) for a, n in zip(start, values.shape, strict=True))] = values
    return result


def measure(run: Run, ranks: Ranks, steps: int, out: Path) -> None:
    device = device_of(run.config.cluster.instance_type, ranks.local_rank)
    task = task_of(run)
    with device_meshes(device, ranks, run.plan.degrees, task.layout.sharding.shard_ranks) as meshes:
        attempt = TrainingLoop(task, ranks, device, meshes)
        attempt.add_reference()
        others = [
            parameter.register_hook(lambda gradient: gradient * (1 + 1e-4 * ranks.rank * torch.rand(())))
            for name, parameter in attempt.trained_weights.parameters.items()
            if attempt.trained_weights.shards[name].split.share < 1 and parameter.ndim == 1
        ]
        losses = [attempt.step(step, []).loss for step in range(1, steps + 1)]
        attempt.trained_weights.check_replicas(steps)
        for each in others:
            each.remove()
        means, _ = attempt.forward_backward(steps + 1)
        loss = means[0] / run.plan.degrees.tensor_parallel
        dist.all_reduce(loss)
        tensors = {"loss": torch.tensor([*losses, loss.item()], dtype=torch.float64)}
        for names in attempt.trained_weights.buckets:
            for name, gradient in zip(names, attempt.trained_weights.take_gradients(names), strict=True):
                tensors[f"gradient.{name}"] = whole(attempt.trained_weights.shards[name].wrap(gradient))
        for name, shard in attempt.trained_weights.shards.items():
            tensors[f"parameter.{name}"] = whole(shard.wrap(attempt.trained_weights.master(name)))
        if ranks.is_rank_0:
            save_file(tensors, out / f"{run.config.name}.safetensors")


def main() -> None:
    steps, out, directories = int(sys.argv[1]), Path(sys.argv[2]), [Path(argument) for argument in sys.argv[3:]]
    adapters.initial_value = filled_value
    devices.same_bits = lambda device: False
    loss.loss_block = lambda *, fused: 16  # so that small batches have several
    offload = activations.offload_layers
    # small models have no tensors of a size that would move
    activations.offload_layers = lambda layers, device: offload(layers, device, at_least=1)
    for index, directory in enumerate(directories):
        run = Run.open(directory)
        ranks = join_ranks(run.plan.degrees.world_size)
        store = dist.PrefixStore(str(index), ranks.store)
        measure(run, Ranks(ranks.rank, ranks.world_size, ranks.local_rank, store), steps, out)


if __name__ == "__main__":
    main()
