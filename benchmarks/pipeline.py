"""Benchmarks engine torch's pipelines: the share of a step in which ranks are idle, against the formula.

python -m benchmarks.pipeline

Ranks train a small Llama on CPUs, and each pass of a micro batch through a stage is timed. The idle share is that of
the same passes, in the order in which each rank computed them, if every rank had a processor to itself and sent at
once: it has the unevenness of real stages, but not this machine's load, nor its network. Writes
benchmarks/results/pipeline.json; `python -m benchmarks.table` adds it to the documentation.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.measure import CommandError
from benchmarks.synthetic import Geometry
from benchmarks.training import KIT_PACKAGES
from benchmarks.training_run import Case, prepare
from hyperpod_ft.planning.torch import pipeline
from hyperpod_ft.runs.run import Run

GEOMETRY = Geometry(layers=8, hidden=256, intermediate=768, heads=8, kv_heads=4, vocabulary=2048)
WARM_UP, STEPS = 2, 7
SIZES = ((2, 4), (2, 16), (4, 8))  # ranks, micro batches
SCHEDULES = ("1f1b", "interleaved", "gpipe")
Passes = Sequence[Sequence[tuple[str, int, int, float]]]
"""Of each rank, in its order: F or B, stage, micro batch, seconds."""


def main() -> None:
    arguments = command.parser("Benchmark the idle share of pipelines.", peers=False).parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    cases = []
    for ranks, micro_batches in SIZES:
        with tempfile.TemporaryDirectory(dir=arguments.work) as scratch:
            directory = Path(scratch).resolve()
            runs = [_prepared(directory, ranks, micro_batches, name) for name in SCHEDULES]
            rounds = [_train(runs, ranks, directory / str(number)) for number in range(arguments.rounds)]
        for run, of_rounds in zip(runs, zip(*rounds, strict=True), strict=True):
            steps = [passes for found in of_rounds for passes in found]
            case = {
                "ranks": ranks,
                "micro_batches": micro_batches,
                "schedule": run.config.parallelism.pipeline_schedule,
                "formula": pipeline.idle_share(run.config, run.plan.degrees),
                "idle": statistics.median(idle(passes) for passes in steps),
                "uneven": statistics.median(_uneven(passes) for passes in steps),
            }
            cases.append(case)
            print(case, flush=True)
    line = f"python -m benchmarks.pipeline --rounds {arguments.rounds}"
    facts = command.facts_alone(arguments.work, line, KIT_PACKAGES)
    command.record(arguments.results, "pipeline", "idle", facts | {"cases": cases})


def _prepared(directory: Path, ranks: int, micro_batches: int, name: str) -> Run:
    case = Case("full", "fp32", max_length=128, documents=2, rows=micro_batches, geometry=GEOMETRY)
    changes: dict[str, dict[str, Any]] = {
        "parallelism": {"ranks_per_node": ranks, "pipeline_parallel": ranks, "pipeline_schedule": name},
        "training": {"micro_batch_size": 1, "gradient_accumulation_steps": micro_batches},
    }
    return Run.open(prepare(directory, case, STEPS, changes, name))


def _train(runs: Sequence[Run], ranks: int, output: Path) -> list[list[Passes]]:
    """For each run, the passes of all ranks, step by step. Raises CommandError."""
    output.mkdir()
    directories = [str(run.paths.directory) for run in runs]
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, "benchmarks.pipeline_ranks", str(WARM_UP), str(output), *directories],
        cwd=command.ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise CommandError(f"exit code {done.returncode}: {done.stderr.strip()[-2000:]}")
    of_ranks = [json.loads((output / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
    return [list(zip(*of_run, strict=True)) for of_run in zip(*of_ranks, strict=True)]


def idle(order: Passes) -> float:
    """The share of a step in which ranks wait for what they need, each with a processor to itself."""
    last = max(stage for passes in order for _, stage, _, _ in passes)
    ended: dict[tuple[str, int, int], float] = {}
    waiting, clocks = [list(passes) for passes in order], [0.0] * len(order)
    while any(waiting):
        before = len(ended)
        for rank, passes in enumerate(waiting):
            while passes:
                kind, stage, number, seconds = passes[0]
                # a backward pass of the last stage follows its forward pass
                needs = ("F", stage - 1, number) if kind == "F" else ("B", stage + 1, number)
                if 0 <= needs[1] <= last and needs not in ended:
                    break
                clocks[rank] = max(clocks[rank], ended.get(needs, 0.0)) + seconds
                ended[kind, stage, number] = clocks[rank]
                passes.pop(0)
        assert len(ended) > before, "an order that cannot be followed"
    busy = sum(seconds for passes in order for *_, seconds in passes)
    return 1 - busy / (max(clocks) * len(order))


def _uneven(order: Passes) -> float:
    busy = [sum(seconds for *_, seconds in passes) for passes in order]
    return max(busy) / statistics.mean(busy)


if __name__ == "__main__":
    main()
