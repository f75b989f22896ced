"""The process group, and the device meshes, for any device type in the catalogue."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyperpod_ft.engines.ranks import COLLECTIVE_TIMEOUT, Ranks
from hyperpod_ft.planning.layout import Degrees

# Groups do not inherit the timeout. Torch 2.14 warns of the name that earlier releases have.
_set_timeout: Any = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout


@dataclass(frozen=True)
class Meshes:
    """Views of the ranks: by the weights and the experts that they hold, and by the tokens that they train on."""

    weights: DeviceMesh
    """Axes `pp`, `dp_replicate`, `dp_shard` and `tp`. Ranks along the two dp axes have the same stage and tp slice."""

    tokens: DeviceMesh
    """Axes `dp` and `cp`: each dp rank has its own rows, and its cp ranks share their tokens.

    It has the ranks of `dp_replicate` x `dp_shard` with this rank's stage and tp slice.
    """

    experts: DeviceMesh | None
    """The same ranks, where they divide experts: axes `dp_replicate`, `dp_shard` and `ep`.

    Each ep rank has its own experts, and ranks along the two dp axes have the same.
    """


def backend(device: torch.device) -> str:
    """The process group's backends: the device's own, and gloo for tensors in host memory (`offload: parameters`).

    TorchNeuron's is a ProcessGroup in Python, of which torch drops the others: there, only groups made for gloo alone
    take tensors in host memory.
    """
    own: str = dist.get_default_backend_for_device(device)
    return own if device.type == "cpu" else f"cpu:gloo,{device.type}:{own}"


@contextlib.contextmanager
def device_meshes(device: torch.device, ranks: Ranks, degrees: Degrees, shard_ranks: int = 1) -> Iterator[Meshes]:
    """Join the process group for the block. `shard_ranks` share one copy of the training state.

    The group is left only when the block succeeds: after an error, the process is expected to end. tp is innermost:
    its ranks communicate several times per layer, so they are neighbors on one node; then come those that share a row's
    tokens, the experts or a copy of the state; pipeline stages exchange least.
    """
    # Without `device_id`, with which NCCL would split all groups from this one: that slowed layouts of several axes
    # (NVIDIA-NeMo/RL#3073), and the watch finds a link that hangs.
    dist.init_process_group(
        backend(device),
        store=ranks.store,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    if device.type == "neuron":
        # its runtime starts with the process group, which gives each process its core; it refuses to have started
        torch.accelerator.set_device_index(device.index)
    meshes = make_meshes(device.type, degrees, shard_ranks)
    for mesh in (meshes.weights, meshes.tokens, meshes.experts):
        for group in mesh.get_all_groups() if mesh else ():
            _set_timeout(COLLECTIVE_TIMEOUT, group)
    yield meshes
    # Not after an error: with NCCL it could wait for collectives that other ranks never join, before the error is
    # printed.
    dist.destroy_process_group()


def make_meshes(device_type: str, degrees: Degrees, shard_ranks: int) -> Meshes:
    """The meshes of a process group of `degrees.world_size` ranks."""
    replicas = degrees.weight_replicas
    shape = (degrees.pipeline_parallel, replicas // shard_ranks, shard_ranks, degrees.tensor_parallel)
    weights = init_device_mesh(device_type, shape, mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"))
    sharing = weights["dp_replicate", "dp_shard"]._flatten("dp_cp")
    tokens = sharing._unflatten(0, (degrees.data_parallel, degrees.context_parallel), ("dp", "cp"))
    experts = None
    if degrees.expert_parallel > 1:
        sharding = degrees.expert_shard_ranks(shard_ranks)
        held = (replicas // sharding // degrees.expert_parallel, sharding, degrees.expert_parallel)
        experts = sharing._unflatten(0, held, ("dp_replicate", "dp_shard", "ep"))
    return Meshes(weights, tokens, experts)


def pipeline_ends(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """A group of this rank and that at the other end of its pipeline; None between the ends. Collective over all ranks.

    `mesh`: the weights' one.
    """
    own = None
    for pair in zip(mesh.mesh[0].flatten().tolist(), mesh.mesh[-1].flatten().tolist(), strict=True):
        group = dist.new_group(list(pair), timeout=COLLECTIVE_TIMEOUT)
        if dist.get_rank() in pair:
            own = group
    return own


def groups_of_neighbors(mesh: DeviceMesh, size: int) -> dist.ProcessGroup:
    """This rank's group of `size` neighbors along a mesh of one axis, whose ranks are divided into such groups.

    Collective over all ranks of the process group.
    """
    group = mesh._unflatten(0, (mesh.size() // size, size), ("groups", "neighbors")).get_group("neighbors")
    _set_timeout(COLLECTIVE_TIMEOUT, group)
    return group
