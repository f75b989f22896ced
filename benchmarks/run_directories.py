"""Makes run directories as finished, failed and cancelled runs leave them, without running any of them."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hyperpod_ft.config import run_file
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.records import Output, Record
from hyperpod_ft.runs.run import Run

_FACTS: dict[str, dict[str, Any]] = {
    "dataset": {"train_rows": 800, "validation_rows": 40},
    "train": {"steps": 100, "final_loss": 1.25, "tokens_per_second": 7000.0, "node_hours": 0.5, "attempts": 1},
}
FAILS_AT = {7: "train", 11: "merge", 13: "dataset"}  # of every 20 runs: the stage at which one stops


def write_runs(root: Path, number: int, local_cluster: str = "") -> Iterator[Run]:
    """Write run directories below a root, one after the other; of every 20 runs, 3 have failed.

    Their jobs have ids that no Slurm knows, below those that local clusters give.
    """
    values = {
        "name": "scale",
        "engine": "torch",
        "cluster": {"root": str(root), "instance_type": "local", "nodes": 2},
        "env": {"python": "current"},
        "model": {"source": "example:tiny-llama"},
        "dataset": {"source": "example:qa", "format": "dolly", "max_length": 256},
        "parallelism": {"ranks_per_node": 1},
    }
    config = run_file.resolve(run_file.validate(values, "run file"), root)
    for index in range(number):
        run = Run.of(config.model_copy(update={"name": f"scale-{index % 10}", "seed": index}))
        write_run(run, FAILS_AT.get(index % 20), index * 10 + 1, local_cluster)
        yield run


def write_run(run: Run, failed: str | None, first_job: int, local_cluster: str) -> None:
    """Write the directory of a run that is done, or whose stage `failed` has failed."""
    run.paths.directory.mkdir(parents=True)
    for directory in ("records", "logs", "exits", "provenance"):
        (run.paths.directory / directory).mkdir(exist_ok=True)
    run.freeze()
    run.paths.origin.write_text("quickstart", encoding="utf-8")
    jobs = [
        Job(stage.name, str(first_job + index), "slurm", "2026-11-22T10:00:00Z", local_cluster)
        for index, stage in enumerate(run.plan.stages)
    ]
    run.paths.jobs_path.write_text(json.dumps([asdict(job) for job in jobs], indent=2), encoding="utf-8")
    for job in jobs:
        log, marker = run.paths.log(job.stage, job.job_id), run.paths.exit_marker(job.stage, job.job_id)
        marker.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("worked\n", encoding="utf-8")
        marker.write_text("1\n" if job.stage == failed else "0\n", encoding="utf-8")
        if job.stage == failed:
            break
        _write_record(run, job)
    write_metrics(run.paths.metrics_path, 100)


def _write_record(run: Run, job: Job) -> None:
    path = run.paths.record_path(job.stage)
    if path.exists():
        return
    stage = run.plan[job.stage]
    outputs = []
    for name in ("part-0", "part-1", "part-2"):
        output = (run.paths.root / job.stage if stage.shared else run.paths.directory / job.stage) / name
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_bytes(b"output")
        outputs.append(Output(run.paths.relative(output), 6, ""))
    record = Record(
        job.stage,
        stage.fingerprint,
        {},
        tuple(outputs),
        _FACTS.get(job.stage, {}),
        "2026-11-22T10:00:00Z",
        12.5,
        "node1",
        job.job_id,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(record), indent=2), encoding="utf-8")


def write_metrics(path: Path, rows: int) -> None:
    """Write a metrics.jsonl with a row for each step."""
    with path.open("w", encoding="utf-8") as stream:
        for step in range(1, rows + 1):
            row = {"step": step, "loss": 4 / step**0.3, "learning_rate": 1e-4, "tokens_per_second": 7000.0}
            stream.write(json.dumps(row) + "\n")
