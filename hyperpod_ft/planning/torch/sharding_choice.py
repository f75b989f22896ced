"""Which sharding a run of engine torch gets: the fastest that fits its device."""

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.degrees import Degrees
from hyperpod_ft.planning.memory import GIB, available
from hyperpod_ft.planning.model_shape import ModelShape
from hyperpod_ft.planning.torch.memory import TorchMemory, memory_of
from hyperpod_ft.planning.torch.sharding import Sharding, candidates


def choose_sharding(config: RunConfig, degrees: Degrees, shape: ModelShape | None) -> Sharding:
    """The first of the candidates that fits, else the smallest. `shape` None: the model's size is unknown.

    Without accelerators everything fits; an unknown model gets the sharding that needs the least memory.
    """
    possible = list(candidates(config, degrees))
    room = available(config)
    if not room:
        return possible[0]
    if shape is None:
        return possible[-1]
    return tried_shardings(memory_of(config, degrees, shape))[-1][0]


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


def explain(config: RunConfig, degrees: Degrees, shape: ModelShape | None) -> str:
    """The chosen sharding, and why it is not the next faster one, in one line."""
    room = available(config)
    if not room or shape is None:
        return str(choose_sharding(config, degrees, shape))
    *faster, (chosen, _) = tried_shardings(memory_of(config, degrees, shape))
    if not faster:
        return str(chosen)
    next_faster, needed = faster[-1]
    return f"{chosen} ({next_faster} needs {needed / GIB:.1f} of {room / GIB:.1f} GiB)"
