"""What a run has left: what must be the same as after an undisturbed run, and what must not be there."""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.soaking.site import read_json
from hyperpod_ft.runs.run import Run

# Facts about time, and about how often a run was started; all others must be the same.
_OF_TIME = {
    "time",
    "seconds",
    "seconds_per_step",
    "rows_per_second",
    "documents_per_second",
    "tokens_per_second",
    "mfu",
    "warm_up_seconds",
    "memory_mb",
    "resumed_from",
    "restarts",
    "attempts",
    "node_hours",
    "accelerator_hours",
    "cost",
}
# Of a run whose number of nodes may have changed, these may differ too.
_OF_NODES = {"world_size", "data_parallel", "places"}
_OUTPUTS = ("adapter", "merged", "samples.json")
_ROUNDING = 1e-3  # relative: of what another number of nodes computes
# docs/when-something-fails.md: small, and kept until somebody deletes them.
_KEPT = re.compile(r"/\.[^/]+\.partial-[^/]+$")
_TEMPORARY = re.compile(r"\.partial|\.replaced$|\.tmp|\.discarded-")


def outcome(run: Run) -> dict[str, Any]:
    """The digests of the files, the losses and the records of a finished run, without times and job ids.

    Without digests of what is trained if the number of nodes may have changed.
    """
    rounded = run.config.cluster.min_nodes is not None
    trained = [file for name in _OUTPUTS for file in _files(run.paths.directory / name)]
    files = [file for stage in ("download", "dataset") for file in _outputs(run, stage)]
    files += [] if rounded else trained
    return {
        "rounding": _ROUNDING if rounded else 0.0,
        "files": {run.paths.relative(file): _digest(file, run.paths.root) for file in files},
        "trained": [run.paths.relative(file) for file in trained],
        "metrics": [without_times(json.loads(line)) for line in run.paths.metrics_path.read_text().splitlines()],
        "records": {stage.name: _record(run, stage.name, rounded=rounded) for stage in run.plan.stages},
        # the one before it may be of any step: a cancelled training saves the step it has finished
        "checkpoint": max(run.paths.checkpoints_by_step()),
    }


def differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """What differs between two outcomes, a line each."""
    return list(_differences(expected, found, expected.get("rounding", 0.0), ""))


def leftovers(run: Run) -> list[str]:
    """Temporary names below the root that a finished run must not have."""
    names = [path.relative_to(run.paths.root).as_posix() for path in run.paths.root.rglob("*")]
    return [name for name in names if _TEMPORARY.search(name) and not _KEPT.search(name)]


def lost_and_doubled(run: Run, known: Mapping[str, str], killed_submissions: int, slurm_forgot: bool) -> list[str]:
    """What jobs.json and Slurm do not agree about. `known`: the names of Slurm's jobs by id.

    A submission that was killed may have left a job without an entry; one that failed cancels what it made, so that it
    never starts. A slurmctld that was killed may have forgotten the jobs of its last seconds, and uses their ids again.
    """
    recorded = Counter(job.job_id for job in run.journal.jobs())
    ours = {job_id for job_id, name in known.items() if name.startswith(f"{run.config.name}-")}
    started = {log.stem.rpartition("_")[2] for log in run.paths.logs.glob("*.out")}
    unrecorded = sorted((ours - set(recorded)) & started)
    found = []
    if not slurm_forgot:
        found += [f"job {job_id} is in jobs.json {times} times" for job_id, times in recorded.items() if times > 1]
        found += [f"job {job_id} is in jobs.json, and Slurm does not know it" for job_id in set(recorded) - ours]
    if len(unrecorded) > killed_submissions:
        found.append(f"{killed_submissions} submissions were killed, but {unrecorded} of Slurm are not in jobs.json")
    return found


def work_done_twice(run: Run) -> list[str]:
    """Stages of this run whose logs report more than once that they have finished."""
    counts: Counter[str] = Counter()
    for log in run.paths.logs.glob("*.out"):
        counts.update(re.findall(r"^(\w+): done in ", log.read_text(errors="replace"), re.MULTILINE))
    return [f"stage {stage} was done {times} times" for stage, times in counts.items() if times > 1]


def tracebacks(run: Run) -> Counter[str]:
    """The last lines of the tracebacks in the logs of the run's jobs."""
    counts: Counter[str] = Counter()
    for log in run.paths.logs.glob("*.out"):
        stage = log.name.rpartition("-")[2].partition("_")[0]
        text = log.read_text(errors="replace")
        for match in re.finditer(r"^Traceback .*\n(?:(?:  .*|)\n)*(\w.*)", text, re.MULTILINE):
            counts[f"{stage}: {match[1][:200]}"] += 1
    return counts


def _record(run: Run, stage: str, *, rounded: bool) -> dict[str, Any]:
    record: dict[str, Any] = read_json(run.paths.record_path(stage))
    kept = {key: record[key] for key in ("stage", "fingerprint", "inputs", "versions")}
    outputs = {output["path"]: (output["size"], output["sha256"]) for output in record["outputs"]}
    # its rows hold times, and checkpoints hold what the files of a loss curve do: compared as `metrics` above
    names = [name for name in outputs if "/checkpoints/" in name or name.endswith("metrics.jsonl")]
    facts = without_times(record["facts"])
    if rounded:
        facts = {key: value for key, value in facts.items() if key not in _OF_NODES}
        # each rank writes files of a checkpoint
        outputs = {name: content for name, content in outputs.items() if "/checkpoints/" not in name}
        names = [name for name in outputs if name.startswith("runs/")]
    return {**kept, "outputs": {**outputs, **dict.fromkeys(names)}, "facts": facts}


def _outputs(run: Run, stage: str) -> list[Path]:
    return [run.paths.root / output["path"] for output in read_json(run.paths.record_path(stage))["outputs"]]


def without_times(value: Any) -> Any:
    """A value of JSON without the facts about time in it."""
    if isinstance(value, dict):
        return {key: without_times(inner) for key, inner in value.items() if key not in _OF_TIME}
    return [without_times(inner) for inner in value] if isinstance(value, list) else value


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def _digest(file: Path, root: Path) -> str:
    """SHA-256 of a file, in which the root's path is replaced by a name: every worker has its own."""
    return hashlib.sha256(file.read_bytes().replace(bytes(root), b"ROOT")).hexdigest()


def _differences(expected: Any, found: Any, rounding: float, where: str) -> Iterator[str]:
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in sorted({*expected, *found}):
            yield from _differences(expected.get(key), found.get(key), rounding, f"{where}/{key}")
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from _differences(one, other, rounding, f"{where}/{number}")
    elif isinstance(expected, float) and isinstance(found, float) and math.isclose(expected, found, rel_tol=rounding):
        return
    elif expected != found:
        yield f"{where.lstrip('/')}: {str(expected)[:200]} became {str(found)[:200]}"
