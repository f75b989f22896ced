"""Seconds from a failure to the next new step, and the steps that it costs: two CPU ranks on a local Slurm.

    python -m benchmarks.restarts [FAILURE...] [--rounds 3] [--steps 19]

A tiny model, so that what is measured is the restart. For a lost node, the time begins when Slurm is
told; a real cluster notices it after `SlurmdTimeout`.
"""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from benchmarks import command
from benchmarks.command import ROOT
from hyperpod_ft.localcluster import LocalCluster

_SAVED_EVERY = 10  # steps
_STEPS_BEFORE = 2 * _SAVED_EVERY - 1  # the failure: without memory checkpoints, most is lost
_LONGEST_SECONDS = 300
_NODE = "node2"
_MEMORY = "memory_checkpoint_every_steps"


@dataclass(frozen=True)
class Restart:
    """What a failure cost."""

    seconds: float  # to the next new step
    steps: int  # that were trained again
    # with memory checkpoints, before the failure: the time of the steps after one by that of others, medians
    cost: float | None = None


@dataclass(frozen=True)
class Site:
    """A run at work: its cluster and its directory."""

    cluster: LocalCluster
    directory: Path

    def processes(self, pattern: str) -> list[int]:
        """Those of its jobs, which work in its directory, whose name or command line begins so."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                begins = re.search(f"^{pattern}", (process / "comm").read_text() + line, re.MULTILINE)
                if begins and (process / "cwd").readlink() == self.directory:
                    found.append(int(process.name))
        return found

    def lose_node(self) -> None:
        self.cluster.kill_node(_NODE)
        self._scontrol("update", f"nodename={_NODE}", "state=down", "reason=power")

    def _scontrol(self, *arguments: str) -> None:
        subprocess.run(["scontrol", *arguments], env=os.environ | self.cluster.environment(), check=True)


@dataclass(frozen=True)
class Failure:
    nodes: int
    inject: Callable[[Site], None]
    spare: int = 0  # nodes
    training: Mapping[str, Any] = field(default_factory=dict)  # of the run file


def _signal(pattern: str, number: signal.Signals) -> Callable[[Site], None]:
    return lambda site: os.kill(site.processes(pattern)[0], number)


_RANK, _TORCHRUN = "rank 1", r"\S+ -m hyperpod_ft\.job\.torchrun"


FAILURES: Mapping[str, Failure] = {
    "kill -9 of a rank": Failure(1, _signal(_RANK, signal.SIGKILL)),
    "kill -9 of a rank, two nodes": Failure(2, _signal(_RANK, signal.SIGKILL)),
    "kill -9 of a rank, two nodes, memory checkpoints": Failure(
        2, _signal(_RANK, signal.SIGKILL), training={_MEMORY: 2}
    ),
    "kill -9 of torchrun": Failure(1, _signal(_TORCHRUN, signal.SIGKILL)),
    "SIGSTOP of a rank": Failure(1, _signal(_RANK, signal.SIGSTOP)),
    "a lost node, and a spare one": Failure(2, Site.lose_node, spare=1),
}


def run_file(root: Path, nodes: int, training: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": "restarts",
        "engine": "torch",
        "cluster": {"root": str(root), "instance_type": "local", "nodes": nodes},
        "env": {"python": "current"},
        "model": {"source": "example:tiny-llama"},
        "dataset": {"source": "example:qa", "format": "dolly", "max_length": 256},
        "training": {"precision": "fp32", "max_steps": 100_000, "save_every_steps": _SAVED_EVERY, **training},
        "parallelism": {"tensor_parallel": 1, "ranks_per_node": 2 // nodes},
    }


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LONGEST_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"no new step within {_LONGEST_SECONDS} s")
        time.sleep(0.02)


def cost(metrics: Path, every: int) -> float:
    """The time of the steps after a memory checkpoint by that of the others, medians; half of `every` steps each."""
    times = {row["step"]: row["time"] for row in map(json.loads, metrics.read_text().splitlines())}
    ends = [step for step in sorted(times) if step % (every // 2) == 0 and step > every]
    blocks = [(begin, times[end] - times[begin]) for begin, end in pairwise(ends)]
    after, others = ([took for begin, took in blocks if (begin % every == 0) == saved] for saved in (True, False))
    return statistics.median(after) / statistics.median(others)


def measure(work: Path, failure: Failure, steps_before: int = _STEPS_BEFORE) -> Restart:
    """One run, which the failure hits once, after so many steps."""
    cluster = LocalCluster(work / "cluster")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(work / "state")}

    def kit(*arguments: str) -> str:
        words = [sys.executable, "-m", "hyperpod_ft", *arguments]
        return subprocess.run(words, cwd=work, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout

    cluster.up(nodes=failure.nodes + failure.spare, cpus=4, bound_to=os.getpid())
    environment |= cluster.environment()
    try:
        (work / "run.yaml").write_text(yaml.safe_dump(run_file(work / "root", failure.nodes, failure.training)))
        kit("submit", "run.yaml")
        site = Site(cluster, Path(json.loads(kit("status", "--json"))["directory"]))
        metrics = site.directory / "metrics.jsonl"

        def steps() -> int:
            return metrics.read_text().count("\n") if metrics.exists() else 0

        wait_for(lambda: steps() >= steps_before)
        every = failure.training.get(_MEMORY)
        of_memory = round(cost(metrics, every), 3) if every else None
        failure.inject(site)
        failed, last = time.monotonic(), steps()
        (log,) = (site.directory / "logs").glob("*-train_*.out")
        while not (resumed := re.findall(r"resuming from step (\d+)", log.read_text())):
            last = max(last, steps())  # others of its ranks may go on for a moment
            if time.monotonic() - failed > _LONGEST_SECONDS:
                sys.exit("training does not resume")
            time.sleep(0.02)
        wait_for(lambda: steps() > last)
        seconds = time.monotonic() - failed
        kit("cancel")
        wait_for(lambda: not site.processes(_RANK))  # they remove what they have in memory
        return Restart(round(seconds, 2), last - int(resumed[0]), of_memory)
    finally:
        cluster.down()


def main() -> None:
    options = command.parser(__doc__ or "", peers=False)
    options.add_argument("failures", nargs="*", metavar="FAILURE", help=f"default: all of {', '.join(FAILURES)}")
    options.add_argument("--steps", type=int, default=_STEPS_BEFORE, help="before the failure")
    given = options.parse_args()
    for name in given.failures or FAILURES:
        rounds = []
        for _ in range(given.rounds):
            with tempfile.TemporaryDirectory() as work:
                rounds.append(asdict(measure(Path(work), FAILURES[name], given.steps)))
            print(
                f"{name}: {rounds[-1]['seconds']:.1f} s, {rounds[-1]['steps']} steps, {rounds[-1]['cost']}", flush=True
            )
        typed = f"python -m benchmarks.restarts --rounds {given.rounds} --steps {given.steps}"
        facts = command.facts_alone(given.work.parent, typed, ("torch",))
        command.record(given.results, "restarts", name, {"rounds": rounds, "load": os.getloadavg()[1], **facts})


if __name__ == "__main__":
    main()
