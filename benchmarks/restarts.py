"""Seconds from kill -9 of a rank to the next new step, restarts within the job, on two CPU ranks.

    python -m benchmarks.restarts [--kills 3] [--nodes 1]

A tiny model on a local Slurm, so that what is measured is the restart: of two ranks on one node, or on two.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from benchmarks.command import ROOT
from hyperpod_ft.localcluster import LocalCluster

_SAVED_EVERY = 10  # steps


def run_file(root: Path, nodes: int, kills: int) -> dict[str, Any]:
    return {
        "name": "restarts",
        "engine": "torch",
        "cluster": {"root": str(root), "instance_type": "local", "nodes": nodes, "max_restarts": kills},
        "env": {"python": "current"},
        "model": {"source": "example:tiny-llama"},
        "dataset": {"source": "example:qa", "format": "dolly", "max_length": 256},
        "training": {"precision": "fp32", "max_steps": 100_000, "save_every_steps": _SAVED_EVERY},
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


def measure(work: Path, nodes: int, kills: int) -> list[float]:
    """The seconds after each kill."""
    cluster = LocalCluster(work / "cluster")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(work / "state")}

    def kit(*arguments: str) -> str:
        command = [sys.executable, "-m", "hyperpod_ft", *arguments]
        return subprocess.run(command, cwd=work, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout

    cluster.up(nodes=2, cpus=4, bound_to_parent=True)
    environment |= cluster.environment()
    try:
        (work / "run.yaml").write_text(yaml.safe_dump(run_file(work / "root", nodes, kills)))
        kit("submit", "run.yaml")
        directory = Path(json.loads(kit("status", "--json"))["directory"])
        metrics = directory / "metrics.jsonl"

        def steps() -> int:
            return metrics.read_text().count("\n") if metrics.exists() else 0

        found = []
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
            found.append(time.monotonic() - killed)
        kit("cancel")
        return found
    finally:
        cluster.down()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--nodes", type=int, choices=(1, 2), default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        found = measure(Path(work), options.nodes, options.kills)
    print(f"seconds to the next new step: {', '.join(f'{each:.1f}' for each in found)}")
    print(
        f"median {statistics.median(found):.1f}; of it 1 s to hear of a cancellation, and a pause that doubles from 1 s"
    )


if __name__ == "__main__":
    main()
