"""How evenly the routers of a mixture load the experts of its layers: what training records of it, and what that means.

An expert's load is its number of tokens over the mean of its layer in one step: 1 where loads are even. The largest one
is MaxVio + 1 (Wang et al., arXiv:2408.15664).
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter

from hyperpod_ft.progress import count
from hyperpod_ft.runs.records import checked

LARGEST, DEAD = "expert_load_max", "dead_experts"
"""In metrics.jsonl: over all layers, the largest load, and how many experts got no token."""

_FACT = "expert_load"
_Load = Annotated[float, Field(ge=0, le=10**9)]


class LayerLoad(NamedTuple):
    """Of the experts of a layer."""

    largest: _Load
    smallest: _Load
    dead: Annotated[int, Field(ge=0, le=10**9)]  # experts without a token


Loads = Mapping[str, LayerLoad]
"""By the names of layers, in their order; empty for a model without experts."""


def layer_load(tokens: Sequence[float]) -> LayerLoad:
    """The load of a layer whose experts got so many tokens."""
    mean = sum(tokens) / len(tokens) or 1.0
    return LayerLoad(round(max(tokens) / mean, 4), round(min(tokens) / mean, 4), tokens.count(0))


def metrics(loads: Loads) -> dict[str, float]:
    """What a row of metrics.jsonl says of a step; nothing without experts."""
    if not loads:
        return {}
    return {LARGEST: max(load.largest for load in loads.values()), DEAD: sum(load.dead for load in loads.values())}


def facts(first: Loads, last: Loads) -> dict[str, Any]:
    """Of the first and the last step, for the record of a training; nothing without experts."""
    return {_FACT: [dict(first), dict(last)]} if last else {}


def read(recorded: Mapping[str, Any]) -> tuple[Loads, Loads]:
    """Both, from the facts of a record; empty where they are missing or damaged."""
    first, last = checked(_FACTS, recorded.get(_FACT), ({}, {}))
    return (first, last) if first.keys() == last.keys() else ({}, {})


_FACTS = TypeAdapter(tuple[dict[str, LayerLoad], dict[str, LayerLoad]])


def grew_uneven(first: Loads, last: Loads) -> bool:
    """Whether the largest load, or the number of experts without a token, has at least doubled, the latter to 2."""
    before, after = metrics(first), metrics(last)
    return any(after[name] >= 2 * max(before[name], 1) for name in after)


def described(first: Loads, last: Loads) -> str:
    """The largest load of the last step and how many experts got no token, beside those of the first step."""
    layer = max(last, key=lambda name: last[name].largest)
    before, after = metrics(first), metrics(last)
    return (
        f"the most loaded expert, in {layer}, got {after[LARGEST]:.1f} times the mean number of tokens in the last step"
        f" ({before[LARGEST]:.1f} in the first); {count(int(after[DEAD]), 'expert')} got none ({before[DEAD]:,.0f})"
    )
