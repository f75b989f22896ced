"""The goals, and which of them the recorded results meet. Pure: results in, figures out.

Results come from `benchmarks/results/`: for each benchmark (such as `merge`) and size (layers, or the text's name), an
entry with the contenders and their rounds.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Entry = Mapping[str, Any]
Results = Mapping[str, Mapping[str, Entry]]

KIT, COPY = "hyperpod-ft", "cp -r"
ENGINE_TRL = f"{KIT}, engine trl"
PLAIN_TRL = "trl alone"  # the settings of engine trl, without the kit
ALONE = "one rank"
NAIVE = "naive settings"
S5CMD = "s5cmd"
SMALL, LARGE = "8", "24"  # layers
TEXT, CONVERSATIONS = "text", "conversations"
# the cases of `naive`
EPOCHS = {"llama-lora": "LoRA on a Llama", "gptj-full": "all parameters of a GPT-J"}
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
    """Raw rows per CPU second, per round: the repeated text minus the text once, so that start-up does not count."""
    rows: int = entry["rows"] * (entry["copies"] - 1)
    both = zip(rounds(entry, name), rounds(entry, REPEATED.format(name)), strict=True)
    return [rows / (repeated["cpu"] - once["cpu"]) for once, repeated in both]


def rows_per_cpu_second(entry: Entry) -> float:
    return statistics.median(rates(entry))


def rate_over_peers(entry: Entry) -> float | None:
    """The kit's rows per CPU second over those of the fastest peer."""
    peers = [name for name in entry["contenders"] if name != KIT and REPEATED.format(name) in entry["contenders"]]
    fastest = max((statistics.median(rates(entry, name)) for name in peers), default=None)
    return fastest and rows_per_cpu_second(entry) / fastest


def host_memory_ratio(entry: Entry, name: str = KIT) -> float:
    """Peak memory of all ranks while loading, of the bytes that the model has in memory: the largest of all rounds."""
    return max(one["peak"] for one in rounds(entry, name)) / entry["model_bytes"]


def layout_ratios(entry: Entry, name: str) -> list[float]:
    """CPU seconds of a layout's step, of all ranks, over those of one rank, per round."""
    both = zip(rounds(entry, name), rounds(entry, ALONE), strict=True)
    return [one["cpu"] / alone["cpu"] for one, alone in both]


def unfilled_percent(entry: Entry, name: str = KIT) -> float:
    """Percentage of unfilled slots in all packed rows of the text once."""
    output = entry["contenders"][name]["output"]
    filled: float = output["tokens"] / (output["packed_rows"] * entry["max_length"])
    return 100 * (1 - filled)


def trained_tokens(entry: Entry) -> int:
    """Tokens of an optimizer step."""
    tokens: int = entry["max_length"] * entry["rows"]
    return tokens


def step_time(entry: Entry) -> str:
    """What a step costs: CPU seconds on a CPU, whose cores others use too, and seconds on an accelerator."""
    return "step_cpu" if entry["instance_type"] == "local" else "step_seconds"


def peers_of(entry: Entry) -> list[str]:
    """The contenders that are not of the kit."""
    return [name for name in entry["contenders"] if name not in (KIT, ENGINE_TRL)]


def training_ratios(entry: Entry, name: str = KIT) -> list[float]:
    """Tokens per second of a contender over the fastest peer's, per round."""
    peers = [rounds(entry, peer) for peer in peers_of(entry)]
    time = step_time(entry)
    return [min(peer[i][time] for peer in peers) / one[time] for i, one in enumerate(rounds(entry, name))]


def training_ratio(entry: Entry) -> float | None:
    return statistics.median(training_ratios(entry)) if peers_of(entry) else None


def overheads_of_engine_trl(entry: Entry) -> list[float]:
    """What a step of engine trl costs, over one of a plain script with the same settings, per round."""
    if not {ENGINE_TRL, PLAIN_TRL} <= set(entry["contenders"]):
        return []
    time, both = step_time(entry), zip(rounds(entry, ENGINE_TRL), rounds(entry, PLAIN_TRL), strict=True)
    return [own[time] / plain[time] for own, plain in both]


def overhead_of_engine_trl(entry: Entry) -> float | None:
    ratios = overheads_of_engine_trl(entry)
    return statistics.median(ratios) if ratios else None


def tokens_per_second(entry: Entry, name: str = KIT) -> float:
    return trained_tokens(entry) / median(entry, name, step_time(entry))


def mfu_percent(entry: Entry) -> float:
    """Percentage of the peak FLOPs that the model's arithmetic uses (docs/seeing-a-run.md)."""
    return 100 * median(entry, KIT, "mfu")


def device_gib(entry: Entry) -> float:
    return median(entry, KIT, "beyond_imports") / 2**30


def epoch_ratios(entry: Entry) -> list[float]:
    """CPU seconds of an epoch with naive settings over those with the kit's, per round."""
    both = zip(rounds(entry, NAIVE), rounds(entry, KIT), strict=True)
    return [naive["all_steps_cpu"] / own["all_steps_cpu"] for naive, own in both]


def epoch_ratio(entry: Entry) -> float:
    return statistics.median(epoch_ratios(entry))


def training_memory(entry: Entry) -> float | None:
    """Peak memory of the kit beyond its imports, over that of the peer with the least."""
    least = min((median(entry, peer, "beyond_imports") for peer in peers_of(entry)), default=None)
    return least and median(entry, KIT, "beyond_imports") / least


def transfer_ratios(entry: Entry, name: str = KIT) -> list[float]:
    """Wall time of s5cmd divided by a contender's, per round."""
    return ratios(entry, S5CMD, name)


def transfer_ratio(entry: Entry) -> float | None:
    return statistics.median(transfer_ratios(entry)) if S5CMD in entry["contenders"] else None


@dataclass(frozen=True)
class Goal:
    """`value` computes the figure of the entries `sizes`; `must` and `aim` are upper bounds, lower bounds for a rate.

    A figure of contenders that were not measured is None. Without `must` it is only shown; `aim` is only shown too.
    """

    what: str
    benchmark: str
    sizes: tuple[str, ...]
    value: Callable[..., float | None]
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


def _training_goal(case: str, what: str, must: float, aim: float) -> Goal:
    title = f"{what}, tokens per CPU second over TRL's"
    return Goal(title, "training", (case,), training_ratio, "{:.2f}x", must, aim, is_rate=True)


def _gpu_goals(case: str, what: str, must_mfu: float, aim_mfu: float, aim_rate: float | None) -> Iterator[Goal]:
    title, sizes = f"one GPU, {what}", (case,)
    yield Goal(f"{title}, over TRL's", "gpu", sizes, training_ratio, "{:.2f}x", 1.3, is_rate=True)
    yield Goal(f"{title}, MFU", "gpu", sizes, mfu_percent, "{:.0f} %", must_mfu, aim_mfu, is_rate=True)
    if aim_rate:
        yield Goal(f"{title}, tokens/s", "gpu", sizes, tokens_per_second, "{:,.0f}", None, aim_rate, is_rate=True)


def _overhead_goal(benchmark: str, case: str) -> Goal:
    what = f"{case}, a step of engine trl over a plain script's"
    return Goal(what, benchmark, (case,), overhead_of_engine_trl, "{:.3f}x", 1.03)


GOALS = (
    _training_goal("lora-fp32-512", "LoRA, fp32, rows of 512", 1.3, 1.8),
    _training_goal("lora-fp32-2048", "LoRA, fp32, rows of 2048", 1.7, 2.2),
    _training_goal("lora-bf16-512", "LoRA, bf16, rows of 512", 1.5, 2.0),
    _training_goal("lora-bf16-2048", "LoRA, bf16, rows of 2048", 1.5, 2.0),
    _training_goal("full-fp32-512", "all parameters, fp32, rows of 512", 1.3, 1.6),
    Goal(
        "LoRA, fp32, rows of 2048, peak memory beyond the imports over TRL's",
        "training",
        ("lora-fp32-2048",),
        training_memory,
        "{:.2f}x",
        0.5,
        0.35,
    ),
    *(
        Goal(
            f"{what}, an epoch with naive settings over one with the kit's",
            "naive",
            (case,),
            epoch_ratio,
            "{:.1f}x",
            6,
            10,
            is_rate=True,
        )
        for case, what in EPOCHS.items()
    ),
    _overhead_goal("training", "lora-fp32-512"),
    _overhead_goal("gpu", "lora-8b-4096"),
    *_gpu_goals("lora-8b-4096", "8B LoRA, bf16, packed 4096", 45, 52, 14_000),
    Goal("one GPU, 8B LoRA, packed 4096, memory", "gpu", ("lora-8b-4096",), device_gib, "{:.0f} GiB", None, 75),
    *_gpu_goals("lora-8b-8192", "8B LoRA, bf16, packed 8192", 45, 52, 12_000),
    *_gpu_goals("full-1b-4096", "1B, all parameters, packed 4096", 40, 50, None),
    *_checkpoint_goals("merge", 1.15, 400, 150),
    Goal("merge, CPU seconds per GB", "merge", (SMALL,), cpu_per_gb, "{:.2f}", 1.3, 1.0),
    *_checkpoint_goals("consolidate", 1.2, 300, 200),
    Goal("dataset, rows per CPU second", "dataset", (TEXT,), rows_per_cpu_second, "{:,.0f}", 4000, 12000, is_rate=True),
    Goal(
        "dataset, conversations, rows per CPU second over the fastest peer's",
        "dataset",
        (CONVERSATIONS,),
        rate_over_peers,
        "{:.1f}x",
        2,
        5,
        is_rate=True,
    ),
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
    *(
        Goal(
            f"S3, {verb} of a tree, rate over s5cmd's",
            "s3",
            (verb,),
            transfer_ratio,
            "{:.2f}x",
            must,
            1.0,
            is_rate=True,
        )
        for verb, must in (("push", 0.8), ("pull", None))
    ),
)


def reached(results: Results) -> dict[Goal, float]:
    """The figures of the goals whose entries exist."""
    found: dict[Goal, float] = {}
    for goal in GOALS:
        entries = [results.get(goal.benchmark, {}).get(size) for size in goal.sizes]
        if all(entries) and (value := goal.value(*entries)) is not None:
            found[goal] = value
    return found
