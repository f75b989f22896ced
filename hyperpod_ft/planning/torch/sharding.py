"""Which sharding a run of engine torch gets: the fastest that fits its device. layout.py describes the modes."""

from collections.abc import Iterator

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.layout import Degrees, Mode, Offload, Sharding
from hyperpod_ft.planning.memory import GIB, available
from hyperpod_ft.planning.model_shape import ModelShape
from hyperpod_ft.planning.torch.memory import TorchMemory
from hyperpod_ft.planning.torch.step_memory import memory_of
from hyperpod_ft.planning.undivided.shape import UndividedShape

_MODES: tuple[Mode, ...] = ("replicated", "zero1", "zero2", "zero3")


def candidates(config: RunConfig, degrees: Degrees) -> Iterator[Sharding]:
    """The shardings that the run file allows, the fastest first.

    Raises UserError when `shard_ranks` does not divide the data-parallel ranks.

    LoRA is fastest without any: its gradients are small. With all parameters trained, zero1 communicates as much as
    replicated ranks do and updates less on each. The others communicate more: gradients after every micro batch
    (zero2), weights in every forward and backward pass (zero3; with `auto` within a node before across nodes).
    """
    given, ranks = config.parallelism, degrees.weight_replicas
    in_node = max(1, degrees.ranks_per_node // degrees.tensor_parallel)
    for mode in _order(config):
        if mode == "replicated":
            yield Sharding(mode, 1, given.offload)
        elif given.shard_ranks:
            yield _over(given.shard_ranks, mode, given.offload)
        else:
            within = given.sharding == "auto" and in_node < ranks and degrees.can_shard_experts(in_node)
            if mode == "zero3" and within:
                yield _over(in_node, mode, given.offload)
            yield _over(ranks, mode, given.offload)


def _over(shard_ranks: int, mode: Mode, offload: Offload) -> Sharding:
    """The sharding over this many ranks. A single rank shards nothing, but may keep parameters in host memory."""
    if shard_ranks == 1 and offload != "parameters":
        return Sharding("replicated", 1, offload)
    return Sharding(mode, shard_ranks, offload)


def _order(config: RunConfig) -> tuple[Mode, ...]:
    given = config.parallelism
    if given.sharding != "auto":
        return (given.sharding,)
    if given.offload == "parameters":
        return ("zero3",)
    return _MODES if config.training.method == "lora" else _MODES[1:]


def choose_sharding(config: RunConfig, degrees: Degrees, shape: ModelShape | None) -> Sharding:
    """The first of the candidates that fits, else the smallest. `shape` None: the model's size is unknown.

    Without accelerators everything fits; a model of which not all is known gets the sharding that needs least memory.
    """
    possible = list(candidates(config, degrees))
    room = available(config)
    if not room:
        return possible[0]
    if shape is None or not is_whole(shape):
        return possible[-1]
    return tried_shardings(memory_of(config, degrees, shape))[-1][0]


def is_whole(shape: ModelShape) -> bool:
    """Whether all that a step keeps in memory is known of a shape."""
    return not isinstance(shape, UndividedShape) or shape.complete


def tried_shardings(memory: TorchMemory) -> list[tuple[Sharding, float]]:
    """The candidates, each with its bytes on the fullest rank, up to the one that is chosen.

    That is the first that fits, else the smallest.
    """
    tried: list[tuple[Sharding, float]] = []
    for sharding in candidates(memory.config, memory.degrees):
        needed = memory.on_fullest_rank(sharding)
        tried.append((sharding, needed))
        if needed <= available(memory.config):
            return tried
    sizes = [needed for _, needed in tried]
    return tried[: sizes.index(min(sizes)) + 1]


def explain_sharding(config: RunConfig, degrees: Degrees, shape: ModelShape | None) -> str:
    """The chosen sharding, and why it is not the next faster one, in one line."""
    room = available(config)
    if not room or shape is None or not is_whole(shape):
        return str(choose_sharding(config, degrees, shape))
    *faster, (chosen, _) = tried_shardings(memory_of(config, degrees, shape))
    if not faster:
        return str(chosen)
    next_faster, needed = faster[-1]
    return f"{chosen} ({next_faster} needs {needed / GIB:.1f} of {room / GIB:.1f} GiB)"
