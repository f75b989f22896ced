"""What follows each kind of failure, how often the soak injected it, and the seconds that restarts take."""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.goals import Entry

# A failure, what happens, and the kinds of the soak's faults that are it.
OUTCOMES: Sequence[tuple[str, str, tuple[str, ...]]] = (
    (
        "a rank, or the process that ranks are forked from, is killed",
        "all ranks start again from the newest checkpoint, in the same job step",
        ("kill -9: rank", "kill -9: fork server"),
    ),
    (
        "torchrun, `srun`, Slurm's step manager or a node's check is killed",
        "no rank reports a cause, so Slurm requeues the job, which continues",
        (
            *("kill -9: torchrun", "kill -9: srun", "kill -9: slurmstepd"),
            *("kill -9: node program", "kill -9: health check"),
        ),
    ),
    (
        "a rank or torchrun hangs",
        "after 60 s or ten steps, a new job step begins; the log names the rank that the others wait for",
        ("hung: rank", "hung: torchrun"),
    ),
    (
        "a process stands still for a shorter time",
        "training waits for it",
        ("process frozen", "slow rank"),
    ),
    (
        "a node is lost",
        "Slurm requeues the job, which continues on another node (with `cluster.min_nodes`, on those that are left)",
        ("node lost", "node lost, with min_nodes"),
    ),
    (
        "Slurm's controller or a node's daemon is killed",
        "training continues; commands say that the controller does not answer",
        ("kill -9: slurmctld", "kill -9: slurmd"),
    ),
    (
        "the program of another stage, or the supervisor of `train`, is killed",
        "the stage fails; `resume` runs it again",
        (
            *("kill -9: supervisor", "kill -9: script", "kill -9: stage"),
            *("kill -9: Slurm's clients", "kill -9: others"),
        ),
    ),
    (
        "the volume is full, or its calls fail",
        "nothing half-written is used; if the error lasts, the stage fails, and `resume` runs it again",
        ("volume full", "EIO"),
    ),
    ("a node's clock jumps", "training continues", ("clock jump",)),
    (
        "the time limit is near; somebody cancels or requeues a job",
        "training saves its step; a requeued job continues, a cancelled one after `resume`",
        ("notice of the time limit", "cancel", "scancel of one job", "scontrol requeue"),
    ),
    (
        "`submit` is killed, or runs twice",
        "`submit` it again; no stage runs twice",
        ("kill -9: submit", "two submissions at once", "submit while at work"),
    ),
)


def outcomes() -> Iterator[str]:
    """The table of docs/reliability.md."""
    yield "| what happens | what follows |"
    yield "|---|---|"
    for failure, outcome, _ in OUTCOMES:
        yield f"| {failure} | {outcome} |"


def injected(soak: Mapping[str, Any]) -> Iterator[str]:
    """How often each of these failures was caused; `soak`: what benchmarks.soak recorded."""
    counts: Counter[str] = Counter()
    for entry in soak["invocations"]:
        counts.update({kind: sum(by_stage.values()) for kind, by_stage in entry["faults"].items()})
    yield "| failure | injected |"
    yield "|---|---|"
    for failure, _, kinds in OUTCOMES:
        yield f"| {failure} | {sum(counts[kind] for kind in kinds):,} |"
    runs = sum(sum(entry["runs"].values()) for entry in soak["invocations"])
    found = sum(len(entry["failures"]) for entry in soak["invocations"])
    first = soak["invocations"][0]["started"][:10]
    yield ""
    yield f"In {runs} runs, from {first} on, {found} faults of the kit or of the test itself were found."


def restarts(entries: Mapping[str, Entry]) -> Iterator[str]:
    """How fast training continues; `entries`: of benchmarks.restarts."""
    yield "| failure | seconds to the next new step | steps trained again |"
    yield "|---|---|---|"
    for failure, entry in entries.items():
        seconds = sorted(each["seconds"] for each in entry["rounds"])
        steps = statistics.median(each["steps"] for each in entry["rounds"])
        spread = f" ({seconds[0]:.1f}–{seconds[-1]:.1f})" if len(seconds) > 1 else ""
        yield f"| {failure} | {statistics.median(seconds):.1f}{spread} | {steps:.0f} |"
