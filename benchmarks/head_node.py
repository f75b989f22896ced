"""Benchmarks the commands of the head node: medians of wall time, in seconds.

python benchmarks/head_node.py              # --help and plan
python benchmarks/head_node.py --submit     # also submit, on a local Slurm that it starts and stops
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hyperpod_ft.localcluster import LocalCluster

ROUNDS = 11


def seconds(arguments: list[str], directory: Path, environment: dict[str, str]) -> float:
    """Wall time of one command."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "hyperpod_ft", *arguments],
        cwd=directory,
        env=os.environ | environment,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return time.perf_counter() - start


def report(name: str, times: list[float], target: float) -> None:
    print(f"{name:<22} {statistics.median(times):.3f} s  (of {len(times)}; target {target:.1f} s)")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--submit", action="store_true")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        environment = {"XDG_STATE_HOME": name}
        # interleaved, so that other load on the machine affects both
        rounds = [
            (seconds(["--help"], directory, environment), seconds(["plan", "quickstart"], directory, environment))
            for _ in range(ROUNDS)
        ]
        report("--help", [help_time for help_time, _ in rounds], 0.4)
        report("plan quickstart", [plan_time for _, plan_time in rounds], 0.4)
        if parser.parse_args().submit:
            cluster = LocalCluster(directory / "slurm")
            cluster.up(bound_to=os.getpid())
            environment |= cluster.environment()
            times = []
            for number in range(5):
                name_of_run = ["--set", f"name=benchmark-{number}"]
                times.append(seconds(["submit", "quickstart", *name_of_run], directory, environment))
                seconds(["cancel"], directory, environment)
            report("submit, 7 jobs", times, 2.0)
            cluster.down()


if __name__ == "__main__":
    main()
