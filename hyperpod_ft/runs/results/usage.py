"""How long the training of a run has held its nodes: one small file per attempt, kept up to date by a thread.

Unlike the progress in checkpoints, it includes the time whose steps were lost, since that is billed too. An attempt
begins when its stage starts to work, some seconds after its job; the end of one that was killed is known to within
`_EVERY_SECONDS`, and that a checkpoint was begun to within `_LOOKS_EVERY_SECONDS`.
"""

import contextlib
import os
import platform
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated

from pydantic import Field, TypeAdapter

from hyperpod_ft import heartbeat, publish
from hyperpod_ft.heartbeat import Phase
from hyperpod_ft.runs.job_files import JOB_BEGAN
from hyperpod_ft.runs.jobs import own_job_id
from hyperpod_ft.runs.records import UtcTime, utc_now
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import RunPaths

_EVERY_SECONDS = 15.0
_LOOKS_EVERY_SECONDS = 1.0
# Some words that a terminal can show: the run may be another user's. A file with others counts as damaged.
Words = Annotated[str, Field(pattern=r"^\P{C}{0,100}$")]
Seconds = Annotated[float, Field(ge=0, le=1e10, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, lt=1 << 31)]


@dataclass(frozen=True)
class Usage:
    """How long one attempt at a training run held the nodes of its run."""

    job_id: str
    started: UtcTime
    seconds: Seconds
    nodes: _Count
    accelerators: _Count  # chips on all nodes; 0 where there are none
    instance_type: Words
    degrees: Words  # of parallelism, in words
    ranks: Annotated[int, Field(ge=1)]
    micro_batch_size: Annotated[int, Field(ge=1)]
    host: Words  # of rank 0
    price_per_node_hour: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
    job_began: UtcTime | None = None  # this time; None: not known
    phases: dict[Phase, Seconds] = field(default_factory=dict)  # of rank 0
    reached: tuple[tuple[_Count, Seconds], ...] = ()  # as `heartbeat.Spent` has it


_USAGE = TypeAdapter(Usage)


def beginning(run: Run) -> Usage:
    """An attempt of the run that begins now, on this host."""
    degrees, cluster = run.plan.degrees, run.config.cluster
    return Usage(
        job_id=own_job_id(),
        started=utc_now(),
        seconds=0.0,
        nodes=degrees.nodes,
        accelerators=degrees.nodes * run.config.instance.devices,
        instance_type=cluster.instance_type,
        degrees=str(degrees),
        ranks=degrees.world_size,
        micro_batch_size=run.config.training.micro_batch_size,
        host=platform.node(),
        price_per_node_hour=cluster.price_per_node_hour,
        job_began=os.environ.get(JOB_BEGAN),
    )


@contextlib.contextmanager
def recording_usage(run: Run) -> Iterator[None]:
    """Record one attempt for as long as the block runs, however it ends. In one process of the job."""
    begun, clock = beginning(run), time.monotonic()
    path = run.paths.usage_path / f"{begun.started.replace(':', '')}-{os.getpid()}.json"
    ended = threading.Event()
    heartbeat.count()

    def write() -> None:
        spent, now = heartbeat.spent(), time.monotonic()
        phases = {phase: round(seconds, 3) for phase, seconds in spent.until(now).items()}
        reached = tuple((step, round(seconds, 3)) for step, seconds in spent.reached)
        known = replace(begun, seconds=round(now - clock, 3), phases=phases, reached=reached)
        # a full volume is reported by what the training itself writes
        with contextlib.suppress(OSError):
            publish.write_json(path, asdict(known))

    def keep() -> None:
        written, due = heartbeat.spent().reached, clock + _EVERY_SECONDS
        while not ended.wait(min(_EVERY_SECONDS, _LOOKS_EVERY_SECONDS)):
            reached, now = heartbeat.spent().reached, time.monotonic()
            if reached != written or now >= due:
                write()
                written, due = reached, now + _EVERY_SECONDS

    write()
    keeper = threading.Thread(target=keep, name="usage", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        ended.set()
        keeper.join()
        write()


def read(paths: RunPaths) -> list[Usage]:
    """Every attempt so far, oldest first; damaged files are skipped."""
    found = []
    for path in paths.usage_path.glob("*.json"):
        with contextlib.suppress(OSError, ValueError):
            found.append(_USAGE.validate_json(path.read_bytes()))
    return sorted(found, key=lambda usage: usage.started)
