"""Seconds and steps from kill -9 of a rank to the next new step, restarts within the job, on two CPU ranks.

    python -m benchmarks.restarts [--kills 3] [--nodes 1] [--method lora] [--memory STEPS]

A tiny model on a local Slurm, so that what is measured is the restart: of two ranks on one node, or on two. With
`--memory`, memory checkpoints are that many steps apart, and what they cost is measured too: as many steps after one
against as many before the next.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from benchmarks.command import ROOT
from hyperpod_ft.localcluster import LocalCluster

_SAVED_EVERY = 10  # steps
_UNDISTURBED = 400  # steps


@dataclass(frozen=True)
class Measured:
    """Of each kill, the seconds to the next new step and the steps that were lost; and the rows of metrics.jsonl."""

    seconds: list[float]
    lost: list[int]
    rows: list[dict[str, Any]]


def run_file(root: Path, nodes: int, kills: int, training: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": "restarts",
        "engine": "torch",
        "cluster": {"root": str(root), "instance_type": "local", "nodes": nodes, "max_restarts": kills},
        "env": {"python": "current"},
        "model": {"source": "example:tiny-llama"},
        "dataset": {"source": "example:qa", "format": "dolly", "max_length": 256},
        "training": {"precision": "fp32", "max_steps": 100_000, "save_every_steps": _SAVED_EVERY, **training},
        "parallelism": {"tensor_parallel": 1, "ranks_per_node": 2 // nodes},
    }


def ranks(directory: Path) -> list[int]:
    """The ranks of a run: its jobs work in its directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == directory and (process / "comm").read_text().startswith("rank "):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        if time.monotonic() > deadline:
            sys.exit("no new step within 300 s")
        time.sleep(0.02)


def measure(work: Path, nodes: int, kills: int, **training: Any) -> Measured:
    """`training`: other settings of that section. Without kills, 400 steps are trained."""
    cluster = LocalCluster(work / "cluster")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(work / "state")}

    def kit(*arguments: str) -> str:
        command = [sys.executable, "-m", "hyperpod_ft", *arguments]
        return subprocess.run(command, cwd=work, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout

    cluster.up(nodes=2, cpus=4, bound_to_parent=True)
    environment |= cluster.environment()
    try:
        (work / "run.yaml").write_text(yaml.safe_dump(run_file(work / "root", nodes, kills, training)))
        kit("submit", "run.yaml")
        directory = Path(json.loads(kit("status", "--json"))["directory"])
        metrics = directory / "metrics.jsonl"

        def steps() -> int:
            return metrics.read_text().count("\n") if metrics.exists() else 0

        seconds, lost = [], []
        for _ in range(kills):
            beyond = steps() + _SAVED_EVERY + 2  # a checkpoint, and steps that are lost
            wait_for(lambda beyond=beyond: steps() >= beyond)  # type: ignore[misc]
            *_, victim = ranks(directory)
            os.kill(victim, signal.SIGKILL)
            killed = time.monotonic()
            time.sleep(0.2)
            last = steps()
            # the file loses the steps after the checkpoint when training resumes
            wait_for(lambda last=last: steps() > last)  # type: ignore[misc]
            seconds.append(time.monotonic() - killed)
            resumed = re.findall(r"^train: resuming from step (\d+)", kit("logs", "train"), re.MULTILINE)
            lost.append(last - int(resumed[-1]))
        if not kills:
            wait_for(lambda: steps() >= _UNDISTURBED)
        kit("cancel")
        wait_for(lambda: not ranks(directory))  # they remove what they have in memory
        return Measured(seconds, lost, [json.loads(row) for row in metrics.read_text().splitlines()])
    finally:
        cluster.down()


def cost(rows: Sequence[Mapping[str, Any]], every: int) -> float:
    """The time of the steps that follow a memory checkpoint against that of as many others, the medians."""
    times = {row["step"]: row["time"] for row in rows}
    ends = [step for step in sorted(times) if step % (every // 2) == 0 and step > every]
    blocks = [(begin, times[end] - times[begin]) for begin, end in pairwise(ends)]
    after, others = ([took for begin, took in blocks if (begin % every == 0) == saved] for saved in (True, False))
    return statistics.median(after) / statistics.median(others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--nodes", type=int, choices=(1, 2), default=1)
    parser.add_argument("--method", choices=("lora", "full"), default="lora")
    parser.add_argument("--memory", type=int, metavar="STEPS")
    options = parser.parse_args()
    training: dict[str, Any] = {"method": options.method}
    if options.memory:
        training |= {"memory_checkpoint_every_steps": options.memory, "save_every_steps": 10 * options.memory}
    with tempfile.TemporaryDirectory() as work:
        found = measure(Path(work), options.nodes, options.kills, **training)
    if options.kills:
        print(f"seconds to the next new step: {', '.join(f'{each:.1f}' for each in found.seconds)}")
        print("of them 1 s to hear of a cancellation, and a pause that doubles from 1 s")
        print(f"steps lost: {', '.join(map(str, found.lost))}")
    elif options.memory:
        share = cost(found.rows, options.memory)
        print(f"{options.memory // 2} steps after a memory checkpoint take {share:.3f} of the time of others")


if __name__ == "__main__":
    main()
