"""Which degrees of parallelism a run gets: all that divide its ranks are tried, with the checks of given ones.

Those that the engine, the model or the memory does not allow are refused, with the reason as a user would read it. Of
the others, the kit takes those with the highest estimated tokens per second.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sections.parallelism import Parallelism
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.automatic.step_time import StepTime, step_time
from hyperpod_ft.planning.layout import Degrees, Sharding, divisors
from hyperpod_ft.planning.memory import GIB, available
from hyperpod_ft.planning.model_fit import check_memory, check_trainable, shape_of
from hyperpod_ft.planning.model_shape import ModelShape
from hyperpod_ft.planning.parallelism import degrees_of, ranks_per_node
from hyperpod_ft.planning.t5_shape import T5Shape
from hyperpod_ft.planning.torch.sharding import choose_sharding, is_whole, tried_shardings
from hyperpod_ft.planning.torch.step_memory import memory_of

_SHOWN = 8  # degrees that a proposal shows
_SHOWN_SLOWER = 3  # of these, at most, that are allowed but slower


@dataclass(frozen=True)
class AllowedDegrees:
    """Degrees that the engine and the model allow."""

    config: RunConfig  # with these degrees
    degrees: Degrees
    sharding: Sharding
    needed: float | None  # bytes on the fullest rank; None: without accelerators they are not estimated
    time: StepTime

    @property
    def rows_per_step(self) -> int:
        """Training rows in one step."""
        return self.config.rows_per_step(self.degrees.data_parallel)

    @property
    def tokens_per_second(self) -> float:
        return self.rows_per_step * self.config.dataset.max_length / self.time.total


@dataclass(frozen=True)
class Proposal:
    """The degrees of a run, and some of those that it does not get.

    `slower`: the fastest first. `refused`: each with the reason, one line; the fastest that do not fit, then one for
    each key of the run file that refuses others.
    """

    chosen: AllowedDegrees
    slower: tuple[AllowedDegrees, ...]
    refused: tuple[tuple[Degrees, str], ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "layouts": [
                {
                    "degrees": str(allowed.degrees),
                    "sharding": str(allowed.sharding),
                    "bytes": allowed.needed,
                    "rows_per_step": allowed.rows_per_step,
                    "seconds_per_step": allowed.time.total,
                    "tokens_per_second": allowed.tokens_per_second,
                }
                for allowed in (self.chosen, *self.slower)
            ],
            "refused": [{"degrees": str(degrees), "reason": reason} for degrees, reason in self.refused],
        }


def propose(config: RunConfig, model_config: Mapping[str, Any]) -> Proposal:
    """Choose the degrees of a run whose `parallelism.degrees` is auto; `model_config` is the model's config.json.

    Raises UserError when the size of the model is unknown, or no degrees are possible.
    """
    shape = timed_shape(model_config)
    if shape is None:
        family = model_config.get("model_type") or "(none)"
        raise UserError(
            f"parallelism.degrees: the speed of {family} models cannot be estimated",
            "remove it, and set the degrees yourself",
        )
    room = available(config)
    fitting: list[AllowedDegrees] = []
    too_large: list[AllowedDegrees] = []
    impossible: dict[str, tuple[Degrees, str]] = {}  # by key of the run file
    first_error: UserError | None = None
    for candidate, degrees in _candidates(config):
        try:
            found = _allowed(candidate, model_config, shape)
        except UserError as error:
            first_error = first_error or error
            impossible.setdefault(error.problem.partition(":")[0], (degrees, error.problem))
            continue
        (too_large if found.needed and found.needed > room else fitting).append(found)
    if not fitting and not too_large and first_error:
        raise first_error  # the first candidate divides nothing: all others contradict the same
    if not fitting:
        raise _nothing_fits(shape, too_large)
    # of equally fast ones, those that divide a model least
    fitting.sort(key=lambda allowed: (-allowed.tokens_per_second, allowed.degrees.model_ranks))
    chosen, *others = fitting
    too_large.sort(key=lambda allowed: -allowed.tokens_per_second)
    refused = [(allowed.degrees, _too_large(allowed, room)) for allowed in too_large[:_SHOWN_SLOWER]]
    slower = others[:_SHOWN_SLOWER]
    refused += list(impossible.values())[: _SHOWN - 1 - len(slower) - len(refused)]
    return Proposal(chosen, tuple(slower), tuple(refused))


def timed_shape(model_config: Mapping[str, Any]) -> ModelShape | None:
    """The shape of a model whose speed can be estimated; None for T5, and where config.json does not tell enough."""
    shape = shape_of(model_config)
    return None if shape is None or isinstance(shape, T5Shape) or not is_whole(shape) else shape


def _candidates(config: RunConfig) -> Iterator[tuple[RunConfig, Degrees]]:
    """The run file with all degrees whose product divides its ranks; none is checked yet."""
    nodes, on_node, default = config.cluster.nodes, ranks_per_node(config), Parallelism()
    ranks = nodes * on_node
    for tensor in divisors(on_node):
        for stages in divisors(ranks // tensor):
            for context in divisors(ranks // tensor // stages):
                given = {
                    "degrees": "manual",
                    "tensor_parallel": tensor,
                    "pipeline_parallel": stages,
                    "context_parallel": context,
                }
                if stages == 1:  # the run file's are for degrees with a pipeline
                    given |= {key: getattr(default, key) for key in ("pipeline_schedule", "virtual_pipeline_parallel")}
                parallelism = config.parallelism.model_copy(update=given)
                candidate = config.model_copy(update={"parallelism": parallelism})
                yield candidate, Degrees(nodes, on_node, tensor, stages, context)


def _allowed(config: RunConfig, model_config: Mapping[str, Any], shape: ModelShape) -> AllowedDegrees:
    """Raises UserError as submitting a run file with these degrees would, except for its memory."""
    degrees = degrees_of(config)
    check_trainable(config, degrees, model_config)
    memory = memory_of(config, degrees, shape)
    needed: float | None = None
    if available(config):
        sharding, needed = tried_shardings(memory)[-1]
    else:
        sharding = choose_sharding(config, degrees, shape)
    return AllowedDegrees(
        config=config,
        degrees=degrees,
        sharding=sharding,
        needed=needed,
        time=step_time(config, degrees, shape, sharding, memory.stages),
    )


def _too_large(allowed: AllowedDegrees, room: float) -> str:
    return f"needs {(allowed.needed or 0.0) / GIB:.1f} of {room / GIB:.1f} GiB ({allowed.sharding})"


def _nothing_fits(shape: ModelShape, too_large: list[AllowedDegrees]) -> UserError:
    """The arithmetic of the degrees that need least, and what would make it fit."""
    closest = min(too_large, key=lambda allowed: allowed.needed or 0.0)
    try:
        check_memory(closest.config, closest.degrees, shape)
    except UserError as error:
        tried = "the only possible layout does not fit: "
        if len(too_large) > 1:
            tried = f"none of the {len(too_large)} possible layouts fits; the one that needs least is "
        return UserError(f"parallelism.degrees: {tried}{closest.degrees}, {error.problem}", error.remedy)
    raise AssertionError("does not fit, but is not refused")
