"""How long the training of a run has held its nodes: a small file an attempt, which a thread keeps up to date.

Progress counts the steps that a checkpoint has saved; a bill counts every minute, those lost in a kill too. An attempt
begins when its stage begins to work, some seconds after its job, and one that is killed is known to within
`_EVERY_SECONDS`.
"""

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hyperpod_ft import publish
from hyperpod_ft.config.instances import CATALOGUE
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.runs.run import Run

_EVERY_SECONDS = 15.0


@dataclass(frozen=True)
class Attempt:
    """One time that training held all the nodes of a run."""

    job_id: str
    started: str  # ISO 8601, UTC
    seconds: float
    nodes: int
    accelerators: int  # chips on all nodes; 0 where there are none


@contextlib.contextmanager
def counted(run: Run) -> Iterator[None]:
    """Keep the account of one attempt while the block lasts, whatever ends it. On one process of the job."""
    started, clock = utc_now(), time.monotonic()
    job_id = os.environ.get("HYPERPOD_FT_JOB_ID", "")
    path = run.attempts / f"{started.replace(':', '')}-{os.getpid()}.json"
    nodes = run.plan.degrees.nodes
    accelerators = nodes * CATALOGUE[run.config.cluster.instance_type].devices
    ended = threading.Event()

    def write() -> None:
        seconds = round(time.monotonic() - clock, 3)
        # a full volume ends the training, if anything does, with words of its own
        with contextlib.suppress(OSError):
            publish.write_json(path, asdict(Attempt(job_id, started, seconds, nodes, accelerators)))

    def keep() -> None:
        while not ended.wait(_EVERY_SECONDS):
            write()

    write()
    keeper = threading.Thread(target=keep, name="usage", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        ended.set()
        keeper.join()
        write()


def attempts(run: Run) -> list[Attempt]:
    """Every attempt so far, oldest first; a damaged file counts for nothing."""
    found = []
    for path in run.attempts.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            attempt = Attempt(**json.loads(path.read_text(encoding="utf-8")))
            if _is_sound(attempt):
                found.append(attempt)
    return sorted(found, key=lambda attempt: attempt.started)


def _is_sound(attempt: Attempt) -> bool:
    numbers = (attempt.seconds, attempt.nodes, attempt.accelerators)
    return isinstance(attempt.started, str) and all(0 <= number < math.inf for number in numbers)


def totals(run: Run) -> dict[str, Any]:
    """Over all attempts: hours of nodes and of accelerators, and what they cost.

    Accelerator-hours are None where there are no accelerators.
    """
    every = attempts(run)
    node_hours = sum(attempt.nodes * attempt.seconds for attempt in every) / 3600
    accelerator_hours = sum(attempt.accelerators * attempt.seconds for attempt in every) / 3600
    return {
        "attempts": len(every),
        "node_hours": round(node_hours, 4),
        "accelerator_hours": round(accelerator_hours, 4) or None,
        "cost": cost(run, node_hours),
    }


def cost(run: Run, node_hours: float) -> float | None:
    """In the currency of `cluster.price_per_node_hour`; None where it is not given."""
    price = run.config.cluster.price_per_node_hour
    return None if price is None else round(node_hours * price, 4)
