"""Benchmarks engine torch's layouts: the time of a step against one rank's with the same rows, and the bytes sent.

python -m benchmarks.layouts

Ranks train a small Llama on CPUs, all parameters in fp32, with one thread each. Time is that of all ranks together in
CPU seconds; the elapsed time is recorded too, and says nothing on a busy machine. Bytes are counted in one step
(sent_bytes.py). In the second part rows grow with the ranks, so that each computes as much on 8 ranks as on
one: only bytes are recorded. Writes benchmarks/results/layouts.json; `python -m benchmarks.table` adds the first part
to the documentation.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.goals import ALONE
from benchmarks.measure import CommandError
from benchmarks.synthetic import Geometry
from benchmarks.training import KIT_PACKAGES, ONE_THREAD
from benchmarks.training_run import Case, prepare

MICRO_BATCHES = 4
STEPS = 7
TIMED = Case("full", "fp32", 256, 2, 8, Geometry(4, hidden=256, intermediate=768, heads=8, kv_heads=4, vocabulary=4096))
# widths that eight tensor-parallel ranks divide, and layers for eight pipeline stages
SCALED = Case(
    "full", "fp32", 128, 2, 8, Geometry(8, hidden=128, intermediate=384, heads=8, kv_heads=8, vocabulary=2048)
)
SCALED_RANKS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Layout:
    """`parallelism` is that of a run file. Ranks that share no weights divide the rows of a micro batch."""

    ranks: int
    parallelism: Mapping[str, Any] = field(default_factory=dict)

    @property
    def data_parallel(self) -> int:
        degrees = ("tensor_parallel", "pipeline_parallel", "context_parallel")
        model_ranks = 1
        for degree in degrees:
            model_ranks *= self.parallelism.get(degree, 1)
        return self.ranks // model_ranks


_WHOLE_SEQUENCE = {"sequence_parallel": False}
LAYOUTS = {
    ALONE: Layout(1),
    "TP 2": Layout(2, {"tensor_parallel": 2} | _WHOLE_SEQUENCE),
    "TP 2, sequence parallelism": Layout(2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "PP 2, 1F1B": Layout(2, {"pipeline_parallel": 2}),
    "CP 2": Layout(2, {"context_parallel": 2}),
    "DP 2, `replicated`": Layout(2, {"sharding": "replicated"}),
    "DP 2, `zero1`": Layout(2, {"sharding": "zero1"}),
    "DP 2, `zero2`": Layout(2, {"sharding": "zero2"}),
    "DP 2, `zero3`": Layout(2, {"sharding": "zero3"}),
    "DP 4, `zero3` over 2": Layout(4, {"sharding": "zero3", "shard_ranks": 2}),
}


def scaled_layouts(ranks: int) -> dict[str, Layout]:
    """Those of the second part, by what divides the work."""
    degrees = {"TP": "tensor_parallel", "PP": "pipeline_parallel", "CP": "context_parallel"}
    found = {name: Layout(ranks, {degree: ranks} | _WHOLE_SEQUENCE) for name, degree in degrees.items()}
    modes = ("replicated", "zero1", "zero2", "zero3")
    return {f"DP, `{mode}`": Layout(ranks, {"sharding": mode}) for mode in modes} | found


def main() -> None:
    arguments = command.parser("Benchmark layouts of ranks.", peers=False).parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    line = f"python -m benchmarks.layouts --rounds {arguments.rounds}"
    facts = command.facts_alone(arguments.work, line, KIT_PACKAGES)
    with tempfile.TemporaryDirectory(dir=arguments.work) as name:
        rounds = timed(Path(name).resolve(), arguments.rounds)
    ranks = {name: layout.ranks for name, layout in LAYOUTS.items()}
    contenders = {name: {"ranks": ranks[name], "rounds": rounds[name]} for name in LAYOUTS}
    command.record(arguments.results, "layouts", "steps", facts | asdict(TIMED) | {"contenders": contenders})
    sent: dict[str, dict[str, int]] = {}
    for number in SCALED_RANKS:
        with tempfile.TemporaryDirectory(dir=arguments.work) as name:
            for layout, found in scaled(Path(name).resolve(), number).items():
                sent.setdefault(layout, {})[str(number)] = found
    command.record(arguments.results, "layouts", "scaling", facts | asdict(SCALED) | {"sent": sent})


def timed(directory: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Every layout once a round, after others each time; those of as many ranks in the same processes."""
    runs = {
        name: prepared(directory, f"layout-{number}", layout, TIMED, STEPS)
        for number, (name, layout) in enumerate(LAYOUTS.items())
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in LAYOUTS}
    for number in range(rounds):
        for ranks in sorted({layout.ranks for layout in LAYOUTS.values()}):
            alike = [name for name, layout in LAYOUTS.items() if layout.ranks == ranks]
            first = number % len(alike)
            names = [*alike[first:], *alike[:first]]
            for name, of_ranks in zip(names, measured(ranks, [runs[name] for name in names]), strict=True):
                found[name].append(summary(of_ranks))
                print(f"round {number + 1}: {name}: {found[name][-1]}", flush=True)
    return found


def scaled(directory: Path, ranks: int) -> dict[str, int]:
    """The bytes that the rank which sends most sends in a step, by layout; rows grow with the ranks."""
    layouts = scaled_layouts(ranks)
    case = Case(**asdict(SCALED) | {"rows": SCALED.rows * ranks, "geometry": SCALED.geometry})
    runs = [prepared(directory, f"layout-{number}", layout, case, 2) for number, layout in enumerate(layouts.values())]
    found = {name: summary(of_ranks)["sent"] for name, of_ranks in zip(layouts, measured(ranks, runs), strict=True)}
    print(f"{ranks} ranks: {found}", flush=True)
    return found


def prepared(directory: Path, name: str, layout: Layout, case: Case, steps: int) -> Path:
    """A run of this layout in which all ranks together train `case.rows` rows a step."""
    # a pipeline of eight needs as many micro batches, and a micro batch has at least one row
    micro_batches = max(MICRO_BATCHES, layout.parallelism.get("pipeline_parallel", 1))
    micro_batches = min(micro_batches, case.rows // layout.data_parallel)
    changes = {
        "parallelism": {"ranks_per_node": layout.ranks, **layout.parallelism},
        "training": {
            "micro_batch_size": case.rows // (micro_batches * layout.data_parallel),
            "gradient_accumulation_steps": micro_batches,
        },
    }
    return prepare(directory, case, steps, changes, name)


def measured(ranks: int, runs: Sequence[Path]) -> list[list[dict[str, Any]]]:
    """What each rank measured, for each run. Raises CommandError."""
    with tempfile.TemporaryDirectory() as output:
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        done = subprocess.run(
            [sys.executable, "-m", *torchrun, "benchmarks.layout_ranks", output, *map(str, runs)],
            cwd=command.ROOT,
            env=os.environ | ONE_THREAD | {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise CommandError(f"exit code {done.returncode}: {done.stderr.strip()[-2000:]}")
        of_ranks = [json.loads(Path(output, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
    return [list(run) for run in zip(*of_ranks, strict=True)]


def summary(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of all ranks: CPU seconds together, elapsed seconds of the slowest, bytes of the one that sends most."""
    return {
        "cpu": sum(rank["cpu"] for rank in ranks),
        "wall": max(rank["wall"] for rank in ranks),
        "sent": max(sum(rank["sent"].values()) for rank in ranks),
        "loss": ranks[0]["loss"],
    }


if __name__ == "__main__":
    main()
