"""Which sharding a run of engine torch gets: the fastest that fits its device."""

import itertools

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
    return first_that_fits(memory_of(config, degrees, shape))[0]


def first_that_fits(memory: TorchMemory) -> tuple[Sharding, float]:
    """The first of the candidates that fits, else the smallest, and its bytes on the fullest rank."""
    totals: dict[float, Sharding] = {}
    for sharding in candidates(memory.config, memory.degrees):
        needed = memory.on_fullest_rank(sharding)
        if needed <= available(memory.config):
            return sharding, needed
        totals.setdefault(needed, sharding)
    least = min(totals)
    return totals[least], least


def explain(config: RunConfig, degrees: Degrees, shape: ModelShape | None) -> str:
    """The chosen sharding, and why it is not the next faster one, in one line."""
    chosen = choose_sharding(config, degrees, shape)
    faster = list(itertools.takewhile(lambda sharding: sharding != chosen, candidates(config, degrees)))
    if not faster or shape is None or not available(config):
        return str(chosen)
    needed = memory_of(config, degrees, shape).on_fullest_rank(faster[-1])
    return f"{chosen} ({faster[-1]} needs {needed / GIB:.1f} of {available(config) / GIB:.1f} GiB)"
