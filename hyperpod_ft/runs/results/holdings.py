"""When jobs of a run held their nodes, and what those of its training did there, from the files that they left."""

import contextlib
import math
import re
from bisect import bisect_left
from dataclasses import asdict, replace
from operator import itemgetter
from typing import Any

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.runs import attempts
from hyperpod_ft.runs.attempts import Attempt
from hyperpod_ft.runs.job_files import banner
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.journal import Journal
from hyperpod_ft.runs.records import ISO_UTC_PATTERN, unix_time
from hyperpod_ft.runs.results import goodput, usage
from hyperpod_ft.runs.results.goodput import Held, HeldAttempt, Holding
from hyperpod_ft.runs.results.usage import Usage
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import RunPaths

_HEAD_BYTES = 1 << 16  # of a log: the script's banner comes first


def started(journal: Journal, job: Job) -> float | None:
    """When the job's script first ran, as its log says."""
    log = journal.log_here(job.stage, job.job_id)
    if log is None:
        return None
    with log.open("rb") as stream:
        head = stream.read(_HEAD_BYTES).decode("utf-8", "replace")
    line = re.search(rf"^{re.escape(banner(job.stage, job.job_id))} on \S+, ({ISO_UTC_PATTERN})$", head, re.MULTILINE)
    return unix_time(line[1]) if line else None


def ended(journal: Journal, job: Job) -> float | None:
    """When the job left its exit status; None: it did not, or that came from a store, at another time."""
    if journal.paths.store_listing.exists():
        return None
    try:
        written = journal.paths.exit_marker(job.stage, job.job_id).stat().st_mtime
    except OSError:
        return None
    return written if written >= unix_time(job.submitted) else None  # else of another job with this id


def attempts_of(paths: RunPaths) -> list[tuple[Usage, Attempt | None]]:
    """Every attempt at training, oldest first, with the restart that it ended in, if one is known."""
    restarts: dict[str, list[tuple[float, Attempt]]] = {}
    for restart in attempts.history(paths, "train"):
        restarts.setdefault(restart.job_id, []).append((unix_time(restart.time), restart))
    found = []
    begun_next: dict[str, float] = {}
    for attempt in reversed(usage.read(paths)):
        begun, job = unix_time(attempt.started), attempt.job_id
        known = restarts.get(job, [])
        number = bisect_left(known, begun, key=itemgetter(0))
        follows = number < len(known) and known[number][0] <= begun_next.get(job, math.inf)
        found.append((attempt, known[number][1] if follows else None))
        begun_next[job] = begun
    return found[::-1]


def read(run: Run) -> Held | None:
    """What nodes were held for by the training so far; None before its first attempt, or job that has ended.

    None too if a file cannot be read, and with memory checkpoints from the end of an attempt until the next one trains:
    nothing says yet which of them is left.
    """
    with contextlib.suppress(OSError, ValueError):  # the files may be another user's
        return _read(run)
    return None


def facts(run: Run) -> dict[str, Any]:
    """What the record of training says of the time until now; no more than the number of attempts if it is not known.

    Hours of accelerators are None where there are none; `cost` is None where a price is not given.
    """
    counted = {"attempts": len(usage.read(run.paths))}
    return counted | (hours(found) | {"held": asdict(found)} if (found := read(run)) else {})


def hours(found: Held) -> dict[str, float | None]:
    """The figures of a training that come from the time held, by the names of its facts."""
    figures = {name: getattr(found, name) for name in ("node_hours", "goodput", "accelerator_hours", "cost")}
    return {name: None if value is None else round(value, 4) for name, value in figures.items()}


def _read(run: Run) -> Held | None:
    journal = run.journal
    starts: dict[tuple[float, str], list[tuple[Usage, Attempt | None]]] = {}
    for attempt, restart in attempts_of(journal.paths):
        start = unix_time(attempt.job_began or attempt.started), attempt.job_id
        starts.setdefault(start, []).append((attempt, restart))
    jobs = journal.jobs()
    of_training = {job.job_id: job for job in jobs if job.stage == "train"}
    ends = {job_id: over for job_id, job in of_training.items() if (over := ended(journal, job))}
    for job_id in ends.keys() - {job_id for _, job_id in starts}:  # no rank began
        if began := started(journal, of_training[job_id]):
            starts[began, job_id] = []
    if not starts:
        return None
    needed = [over for job in jobs if job.stage in journal.plan["train"].needs if (over := ended(journal, job))]
    newest = {job_id: began for began, job_id in sorted(starts)}
    free: dict[str, float] = {}  # when a job held nodes last
    holdings = []
    for began, job_id in sorted(starts):
        attempts_there = [_held(*known) for known in starts[began, job_id]]
        over = max((max(one.began + one.seconds, one.ended or 0.0) for one in attempts_there), default=began)
        if newest[job_id] == began:
            over = max(over, ends.get(job_id, 0.0))
        submitted = unix_time(of_training[job_id].submitted) if job_id in of_training else began
        ready = free.get(job_id, max([submitted, *(end for end in needed if end <= began)]))
        at = next((attempt for attempt, _ in starts[began, job_id]), usage.beginning(run))
        price = _price(run.config, at)
        holdings.append(Holding(ready, began, over, at.nodes, attempts_there, at.accelerators, price))
        free[job_id] = over
    if run.config.training.memory_checkpoint_every_steps:
        every = [attempt for holding in holdings for attempt in holding.attempts]
        trains = every and every[-1].reached and every[-1].ended is None
        is_over = job_id in ends or journal.paths.cancel_marker("train", job_id).exists()
        if any(attempt.reached for attempt in every) and not (trains or is_over):
            return None
    if job_id in ends and attempts_there and journal.valid_record("train") is None:  # the newest job gave up
        attempts_there[-1] = replace(attempts_there[-1], checkpoint=journal.last_written_step())
    return goodput.held(holdings)


def _price(config: RunConfig, attempt: Usage) -> float | None:
    """Of a node-hour: that of the run file, which may be given or corrected afterwards, on its own instance type."""
    now = config.cluster
    return now.price_per_node_hour if attempt.instance_type == now.instance_type else attempt.price_per_node_hour


def _held(attempt: Usage, restart: Attempt | None) -> HeldAttempt:
    return HeldAttempt(
        began=unix_time(attempt.started),
        seconds=attempt.seconds,
        phases=attempt.phases,
        reached=attempt.reached,
        reason=restart.reason if restart else f"job {attempt.job_id} ended",
        ended=unix_time(restart.time) if restart else None,
        checkpoint=restart.checkpoint if restart else math.inf,
    )
