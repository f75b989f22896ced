"""Goodput: how much of the time that the nodes of a training were held went into steps that count.

It is the node-seconds of the steps on the final curve / the node-seconds that jobs of stage train held.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hyperpod_ft.heartbeat import Phase

Part = Phase | Literal["other"]
PARTS: dict[Part, str] = {
    "step": "steps that count",
    "start": "starting and loading",
    "validation": "validation",
    "save": "checkpoints",
    "end": "ending",
    "waiting": "waiting for another job",
    "other": "what is not known",
}


@dataclass(frozen=True)
class HeldAttempt:
    """An attempt at training. Unix times, seconds; the first `seconds` of it were counted."""

    began: float
    seconds: float
    phases: Mapping[Phase, float]  # seconds
    # steps that were done when it began to train and when it began to save, and the seconds of its steps until then
    reached: Sequence[tuple[int, float]]
    reason: str  # why it ended, if another followed
    ended: float | None = None  # when that was noticed; None: not known
    checkpoint: float = math.inf  # step of the newest one when it had ended; 0: there was none; inf: nothing says

    def parts(self, seconds: float, resumed: float) -> tuple[dict[Part, float], float]:
        """What so many seconds of it were used for, and those of lost steps.

        `resumed`: the step from which later ones were trained again; inf: none were.
        """
        known = sum(self.phases.values())
        scale = min(1.0, seconds / known) if known else 0.0  # starts have whole seconds: attempts may overlap by one
        steps = self.phases.get("step", 0.0)
        kept = steps if math.isinf(resumed) else min(self._seconds_until(resumed), steps)
        used: dict[Part, float] = {phase: scale * spent for phase, spent in self.phases.items()}
        return used | {"step": scale * kept, "other": seconds - scale * known}, scale * (steps - kept)

    def _seconds_until(self, resumed: float) -> float:
        """The seconds of its steps until that one: in proportion between two that are known, which are not all."""
        before = max(((step, until) for step, until in self.reached if step <= resumed), default=None)
        after = min(((step, until) for step, until in self.reached if step >= resumed), default=before)
        if before is None or after is None or before[0] == after[0]:
            return before[1] if before else 0.0
        return before[1] + (after[1] - before[1]) * (resumed - before[0]) / (after[0] - before[0])


@dataclass(frozen=True)
class Holding:
    """One time that a job of stage train held its nodes. Unix times, seconds."""

    ready: float  # when it waited for nothing but nodes
    began: float
    ended: float
    nodes: int
    attempts: Sequence[HeldAttempt] = ()
    accelerators: int = 0  # on all nodes
    price: float | None = None  # of a node-hour

    @property
    def hours(self) -> float:
        return (self.ended - self.began) / 3600


@dataclass(frozen=True)
class Lost:
    """What a restart cost: steps that were trained again, and the time until the failure was noticed."""

    reason: str  # for example `rank 3: SIGKILL at step 42`
    node_seconds: float


@dataclass(frozen=True)
class Held:
    """What the nodes of a training were held for. `parts` and `lost` add up to all of it."""

    parts: Mapping[Part, float]  # node-seconds
    lost: Sequence[Lost] = ()
    seconds: float = 0.0  # on the clock
    pending: float = 0.0  # seconds that its jobs waited for nodes, which are in no other figure
    accelerator_hours: float | None = None  # None: there are no accelerators
    cost: float | None = None  # in the currency of the prices; None: one is not known

    @property
    def node_seconds(self) -> float:
        return sum(self.parts.values()) + sum(one.node_seconds for one in self.lost)

    @property
    def node_hours(self) -> float:
        return self.node_seconds / 3600

    @property
    def goodput(self) -> float:
        """0 to 1."""
        return self.parts["step"] / (self.node_seconds or 1.0)

    def shares(self) -> list[tuple[str, float]]:
        """What the time was held for, and its share of all, 0 to 1: steps that count, then the longest of others.

        Without shares below one in a thousand.
        """
        others = [(name, self.parts[part]) for part, name in PARTS.items() if part != "step"]
        others += [(f"a restart ({one.reason})", one.node_seconds) for one in self.lost]
        shares = [(name, seconds / (self.node_seconds or 1.0)) for name, seconds in others]
        longest = sorted((one for one in shares if one[1] >= 0.001), key=lambda one: -one[1])
        return [(PARTS["step"], self.goodput), *longest]


def held(holdings: Sequence[Holding]) -> Held:
    """What the nodes were held for; `holdings`: oldest first."""
    resumed = _resumed([attempt for holding in holdings for attempt in holding.attempts])
    parts: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    lost = []
    for holding in holdings:
        position = holding.began
        between: Part = "start"  # what happens until the next attempt begins
        ends = [*(attempt.began for attempt in holding.attempts), holding.ended][1:]
        for attempt, next_began in zip(holding.attempts, ends, strict=False):
            began = _within(attempt.began, position, holding.ended)
            limit = _within(next_began, began, holding.ended)
            counted = min(began + attempt.seconds, limit)
            noticed = _within(counted if attempt.ended is None else attempt.ended, counted, limit)
            parts[between] += holding.nodes * (began - position)
            of_attempt, of_steps = attempt.parts(counted - began, next(resumed))
            for part, seconds in of_attempt.items():
                parts[part] += holding.nodes * seconds
            lost.append(Lost(attempt.reason, holding.nodes * (of_steps + noticed - counted)))
            position, between = noticed, "other" if attempt.ended is None else "start"
        parts["end" if holding.attempts else "start"] += holding.nodes * (holding.ended - position)
    return Held(
        parts,
        [one for one in lost if one.node_seconds],
        sum(holding.ended - holding.began for holding in holdings),
        sum(max(0.0, holding.began - holding.ready) for holding in holdings),
        sum(holding.accelerators * holding.hours for holding in holdings) or None,
        _cost(holdings),
    )


def _cost(holdings: Sequence[Holding]) -> float | None:
    costs = [holding.nodes * holding.hours * holding.price for holding in holdings if holding.price is not None]
    return sum(costs) if len(costs) == len(holdings) else None


def _within(value: float, least: float, most: float) -> float:
    return max(least, min(value, most))


def _resumed(attempts: Sequence[HeldAttempt]) -> Iterator[float]:
    """For each attempt the step from which later ones were trained again; inf: none were."""
    found = []
    least = math.inf
    for attempt in reversed(attempts):
        if least == math.inf:  # else a later one has trained, from a step that may have been in the nodes' memory
            least = attempt.checkpoint
        found.append(least)
        least = min([least, *dict(attempt.reached[:1])])
    return reversed(found)
