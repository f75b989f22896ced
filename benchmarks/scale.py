"""Measures the kit where there is much of everything: runs below a root, nodes of a job, lines of a history.

python -m benchmarks.scale                      # 1,000 runs, 64 nodes, 10,000 lines
python -m benchmarks.scale --runs 0 --nodes 8   # one part alone, smaller

Slurm is real: slurmctld and a slurmd for each node, all on this machine. In the job over many nodes a script of a few
lines stands in for torchrun, since 64 imports of torch on one machine would measure only these; the script, srun, the
health check, its report and the supervisor are the kit's.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks import command
from benchmarks.run_directories import write_metrics, write_runs
from hyperpod_ft.config import run_file
from hyperpod_ft.localcluster import LocalCluster, name_of
from hyperpod_ft.runs import attempts
from hyperpod_ft.runs.attempts import Attempt, NodeFailure
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.run import Run

_ROUNDS = 5
_FIRST_SCREEN = """
import sys
from pathlib import Path
from hyperpod_ft.cli.output import show_runs
from hyperpod_ft.cli.output.tables import console
from hyperpod_ft.launch.follow import follow
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.runs.run import Run
run = Run.open(Path(sys.argv[1]))
console().print(show_runs.status_table(next(follow(run, Launchers()))))
"""
# The interpreter of a run whose ranks are this script: on the first attempt one node fails and the others wait.
_RANKS = """#!/bin/bash
if [[ "$*" != *hyperpod_ft.job.torchrun* ]]; then exec {python} "$@"; fi
date +%s.%N > {marks}/ranks-$SLURM_STEP_ID-$SLURM_PROCID
if ((SLURM_STEP_ID > 0)); then exit 0; fi
if ((SLURM_PROCID != 13 % SLURM_NTASKS)); then exec sleep 600; fi
{python} -c 'import time; from hyperpod_ft.job.recovery import report_failure as r; r(13, 134, time.time())'
exit 134
"""


@dataclass(frozen=True)
class Figure:
    """Medians over the rounds."""

    what: str
    wall: float  # seconds
    cpu: float | None = None  # seconds of the process and its children; None: of several nodes


def measured(what: str, arguments: Sequence[str], environment: dict[str, str], rounds: int = _ROUNDS) -> Figure:
    """A command's wall and CPU time; its exit status is not looked at, since `status` of a failed run has 1."""
    walls, cpus = [], []
    for _ in range(rounds):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(
            [sys.executable, *arguments], env=os.environ | environment, stdout=subprocess.DEVNULL, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        walls.append(time.perf_counter() - start)
        cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return shown(Figure(what, statistics.median(walls), statistics.median(cpus)))


def shown(figure: Figure) -> Figure:
    cpu = "" if figure.cpu is None else f"{figure.cpu:8.2f} s CPU"
    print(f"{figure.what:<70} {figure.wall:8.2f} s {cpu}", flush=True)
    return figure


def of_runs(work: Path, number: int, environment: dict[str, str]) -> Iterator[Figure]:
    """Commands below a root with many runs, 3 of 20 failed."""
    root = work / "root"
    *_, newest = write_runs(root, number, name_of(environment["SLURM_CONF"]))
    cli = ("-m", "hyperpod_ft")
    yield measured(f"`list`, {number:,} runs", [*cli, "list", str(root)], environment)
    yield measured(f"`list --json`, {number:,} runs", [*cli, "list", "--json", str(root)], environment)
    yield measured(f"`status` of one of {number:,} runs", [*cli, "status", str(newest.paths.directory)], environment)
    yield measured("first screen of `submit --watch`", ["-c", _FIRST_SCREEN, str(newest.paths.directory)], environment)


def of_history(work: Path, lines: int, environment: dict[str, str]) -> Iterator[Figure]:
    """A run that was submitted and restarted again and again, and has trained for long."""
    run = next(write_runs(work / "history", 8, name_of(environment["SLURM_CONF"])))
    stages = [stage.name for stage in run.plan.stages]
    jobs = [
        Job(
            stages[index % len(stages)],
            str(index + 1),
            "slurm",
            "2026-11-22T10:00:00Z",
            name_of(environment["SLURM_CONF"]),
        )
        for index in range(lines)
    ]
    run.paths.jobs_path.write_text(json.dumps([asdict(job) for job in jobs], indent=2), encoding="utf-8")
    last = run.journal.latest_jobs()["train"]
    failure = NodeFailure("node1", 0, 134, 0.0)
    attempt = Attempt(last.job_id, "2026-11-22T10:00:00Z", 134, False, (failure,), 0, 0, 100, 100)
    history = [replace(attempt, checkpoint=index, step=index).as_dict() for index in range(lines)]
    restarts_path = run.paths.restarts_path("train")
    restarts_path.parent.mkdir(parents=True, exist_ok=True)
    restarts_path.write_text(json.dumps(history, indent=2), encoding="utf-8")
    write_metrics(run.paths.metrics_path, lines)
    run.paths.record_path("train").unlink()
    what = f"{lines:,} jobs, restarts and rows of metrics"
    yield measured(f"`status`, {what}", ["-m", "hyperpod_ft", "status", str(run.paths.directory)], environment)
    start = time.perf_counter()
    run.journal.add_job(replace(last, job_id=str(lines + 1)))
    yield shown(Figure(f"a job added to jobs.json of {lines:,}", time.perf_counter() - start))
    start = time.perf_counter()
    attempts.add(run.paths, "train", attempt)
    yield shown(Figure(f"a restart added to {lines:,}", time.perf_counter() - start))


def of_nodes(work: Path, number: int) -> Iterator[Figure]:
    """A training over many nodes: plan, scripts, submission, launch, a node's crash, the restart, the end."""
    start = time.perf_counter()
    cluster = LocalCluster(work / "nodes")
    cluster.up(nodes=number, cpus=1, memory_mb=256, bound_to=os.getpid())
    yield shown(Figure(f"a local Slurm of {number} nodes starts", time.perf_counter() - start))
    try:
        yield from _job_over_nodes(work, number, cluster.environment())
    finally:
        cluster.down()


def _job_over_nodes(work: Path, number: int, environment: dict[str, str]) -> Iterator[Figure]:
    marks = work / "marks"
    marks.mkdir()
    python = work / "python"
    python.write_text(_RANKS.format(python=sys.executable, marks=marks), encoding="utf-8")
    python.chmod(0o755)
    run_yaml = work / "run.yaml"
    run_yaml.write_text(
        json.dumps(
            {
                "name": "nodes",
                "engine": "torch",
                "cluster": {"root": str(work / "root64"), "instance_type": "local", "nodes": number},
                "env": {"python": str(python)},
                "model": {"source": "example:tiny-llama"},
                "dataset": {"source": "example:qa", "format": "dolly", "max_length": 256},
                "parallelism": {"ranks_per_node": 1},
            }
        ),
        encoding="utf-8",
    )
    cli = ("-m", "hyperpod_ft")
    yield measured(f"`plan`, {number} nodes", [*cli, "plan", str(run_yaml)], environment)
    yield measured(f"`render`, {number} nodes", [*cli, "render", str(run_yaml)], environment)
    run = Run.of(run_file.load(run_yaml))
    submitted = time.time()
    done = subprocess.run(
        ["sbatch", "--parsable", "--wait", str(run.paths.script("train"))],
        env=os.environ | environment,
        cwd=run.paths.directory,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    log = run.paths.log("train", done.stdout.split()[0]).read_text(encoding="utf-8", errors="replace")
    first, second = ([float(path.read_text()) for path in marks.glob(f"ranks-{step}-*")] for step in (0, 1))
    if done.returncode or len(first) != number or len(second) != number:
        sys.exit(f"{number} nodes: {len(first)} and {len(second)} started ranks, exit status {done.returncode}\n{log}")
    (restart,) = attempts.history(run.paths, "train")
    assert restart.reason == "rank 13: SIGABRT at step 0", restart
    yield shown(
        Figure(f"{number} nodes: from sbatch to the ranks' start on all, health checked", max(first) - submitted)
    )
    yield shown(Figure("a rank fails: from its start to the restarted ranks' start on all", max(second) - min(first)))


def main() -> None:
    options = command.parser("Many runs, many nodes, long histories.", peers=False)
    options.add_argument("--runs", type=int, default=1000, help="runs below one root; 0: not measured")
    options.add_argument("--nodes", type=int, default=64, help="virtual nodes of a job; 0: not measured")
    options.add_argument("--lines", type=int, default=10_000, help="lines of histories; 0: not measured")
    given: argparse.Namespace = options.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    figures: list[Figure] = []
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(dir=given.work) as name:
        work = Path(name)
        cluster = LocalCluster(work / "slurm")
        cluster.up(bound_to=os.getpid())
        environment = cluster.environment() | {"XDG_STATE_HOME": name}
        if given.runs:
            figures += of_runs(work, given.runs, environment)
        if given.lines:
            figures += of_history(work, given.lines, environment)
        cluster.down()
        if given.nodes:
            figures += of_nodes(work, given.nodes)
    typed = f"python -m benchmarks.scale --runs {given.runs} --nodes {given.nodes} --lines {given.lines}"
    facts = command.facts_alone(given.work, typed, ("hyperpod-ft", "pydantic"))
    load.append(os.getloadavg()[0])
    entry = {"figures": [asdict(figure) for figure in figures], "load": sorted(load), **facts}
    command.record(given.results, "scale", "figures", entry)


if __name__ == "__main__":
    main()
