"""The goals, and which of them the recorded results meet. Pure: results in, figures out.

Results come from `benchmarks/results/`: for each benchmark (such as `merge`) and size (layers, or the text's name), an
entry with the contenders and their rounds.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Entry = Mapping[str, Any]
Results = Mapping[str, Mapping[str, Entry]]

KIT, COPY = "hyperpod-ft", "cp -r"
SMALL, LARGE = "8", "24"  # layers
TEXT = "text"
LOADED = tuple(f"{ranks}, {dtype}" for dtype in ("bf16", "fp32") for ranks in ("1 rank", "2 ranks", "4 ranks"))
REPEATED = "{}, repeated"  # a contender of `dataset` on the repeated text


def rounds(entry: Entry, name: str) -> list[Mapping[str, float]]:
    """The measurements of a contender, per round."""
    found: list[Mapping[str, float]] = entry["contenders"][name]["rounds"]
    return found


def ratios(entry: Entry, name: str, to: str = COPY) -> list[float]:
    """Wall time of a contender divided by another's, per round."""
    both = zip(rounds(entry, name), rounds(entry, to), strict=True)
    return [one["wall"] / other["wall"] for one, other in both]


def wall_ratio(entry: Entry) -> float:
    return statistics.median(ratios(entry, KIT))


def median(entry: Entry, name: str, what: str) -> float:
    """The median over the rounds of a contender."""
    return statistics.median(one[what] for one in rounds(entry, name))


def peak_mb(entry: Entry, name: str = KIT) -> float:
    """The largest peak of all rounds, in 1e6 bytes."""
    return max(one["peak"] for one in rounds(entry, name)) / 1e6


def growth(small: Entry, large: Entry) -> float:
    return peak_mb(large) / peak_mb(small)


def cpu_per_gb(entry: Entry, name: str = KIT) -> float:
    """CPU seconds per 1e9 bytes of the model."""
    nbytes: int = entry["model_bytes"]
    return median(entry, name, "cpu") / (nbytes / 1e9)


def rates(entry: Entry, name: str = KIT) -> list[float]:
    """Rows per CPU second, per round: the repeated text minus the text once, so that start-up does not count."""
    rows: int = entry["rows"] * (entry["copies"] - 1)
    both = zip(rounds(entry, name), rounds(entry, REPEATED.format(name)), strict=True)
    return [rows / (repeated["cpu"] - once["cpu"]) for once, repeated in both]


def rows_per_cpu_second(entry: Entry) -> float:
    return statistics.median(rates(entry))


def host_memory_ratio(entry: Entry, name: str = KIT) -> float:
    """Peak memory of all ranks while loading, of the bytes that the model has in memory: the largest of all rounds."""
    return max(one["peak"] for one in rounds(entry, name)) / entry["model_bytes"]


def unfilled_percent(entry: Entry, name: str = KIT) -> float:
    """Percentage of unfilled slots in all packed rows of the text once."""
    output = entry["contenders"][name]["output"]
    filled: float = output["tokens"] / (output["packed_rows"] * entry["max_length"])
    return 100 * (1 - filled)


@dataclass(frozen=True)
class Goal:
    """`value` computes the figure of the entries `sizes`; `must` and `aim` are upper bounds, lower bounds for a rate.

    Without `must` the figure is only shown.
    """

    what: str
    benchmark: str
    sizes: tuple[str, ...]
    value: Callable[..., float]
    form: str
    must: float | None
    aim: float | None = None
    is_rate: bool = False

    def met(self, value: float) -> bool:
        if self.must is None:
            return True
        return value >= self.must if self.is_rate else value <= self.must


def _checkpoint_goals(operation: str, aim_wall: float, must_peak: float, aim_peak: float) -> tuple[Goal, ...]:
    wall = "{:.2f}x"
    return (
        Goal(
            f"{operation}, {SMALL} layers, wall against `cp -r`", operation, (SMALL,), wall_ratio, wall, 1.5, aim_wall
        ),
        Goal(f"{operation}, {LARGE} layers, wall against `cp -r`", operation, (LARGE,), wall_ratio, wall, None),
        *(
            Goal(
                f"{operation}, peak memory, {size} layers",
                operation,
                (size,),
                peak_mb,
                "{:.0f} MB",
                must_peak,
                aim_peak,
            )
            for size in (SMALL, LARGE)
        ),
        # the bound is larger than the spread between two identical runs
        Goal(
            f"{operation}, peak memory, {LARGE} layers against {SMALL}",
            operation,
            (SMALL, LARGE),
            growth,
            "{:.2f}x",
            1.1,
        ),
    )


GOALS = (
    *_checkpoint_goals("merge", 1.15, 400, 150),
    Goal("merge, CPU seconds per GB", "merge", (SMALL,), cpu_per_gb, "{:.2f}", 1.3, 1.0),
    *_checkpoint_goals("consolidate", 1.2, 300, 200),
    Goal("dataset, rows per CPU second", "dataset", (TEXT,), rows_per_cpu_second, "{:,.0f}", 4000, 12000, is_rate=True),
    Goal("dataset, peak memory", "dataset", (TEXT,), peak_mb, "{:.0f} MB", 150),
    Goal("dataset, unfilled slots of best-fit packing", "dataset", (TEXT,), unfilled_percent, "{:.2f} %", 0.2),
    *(
        Goal(
            f"loading, peak host memory of {size} against the model's bytes",
            "loading",
            (size,),
            host_memory_ratio,
            "{:.3f}x",
            1.2,
            1.05,
        )
        for size in LOADED
    ),
)


def reached(results: Results) -> dict[Goal, float]:
    """The figures of the goals whose entries exist."""
    return {
        goal: goal.value(*(results[goal.benchmark][size] for size in goal.sizes))
        for goal in GOALS
        if set(goal.sizes) <= set(results.get(goal.benchmark, {}))
    }
