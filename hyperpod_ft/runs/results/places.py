"""Where the steps of a training ran: nodes, instance type and degrees, which another attempt may have changed."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from hyperpod_ft.runs.records import unix_time
from hyperpod_ft.runs.results import usage
from hyperpod_ft.runs.results.metrics import intact_rows
from hyperpod_ft.runs.results.usage import Usage, Words
from hyperpod_ft.runs.run_paths import RunPaths


@dataclass(frozen=True)
class StepPlace:
    """Where the steps from `step` on ran: the first one that was logged there."""

    step: int
    nodes: int
    instance_type: Words
    degrees: Words  # for example `dp 4 x tp 8`

    def __str__(self) -> str:
        return f"{self.instances} ({self.degrees})"

    @property
    def instances(self) -> str:
        return f"{self.nodes} x {self.instance_type}"

    @property
    def change(self) -> str:
        """For example `from step 120: 3 x p5.48xlarge (dp 3 x tp 8)`."""
        return f"from step {self.step}: {self}"


PLACES = TypeAdapter(tuple[StepPlace, ...])


def read(paths: RunPaths) -> tuple[StepPlace, ...]:
    """The place of the first steps, and each change after it; steps of no known attempt are left out."""
    attempts = usage.read(paths)
    never_moved = len({(attempt.nodes, attempt.instance_type, attempt.degrees) for attempt in attempts}) == 1
    found: list[StepPlace] = []
    for row, attempt in rows(paths, attempts) if attempts else ():
        if not attempt:
            continue
        place = StepPlace(row["step"], attempt.nodes, attempt.instance_type, attempt.degrees)
        if not found or str(place) != str(found[-1]):
            found.append(place)
        if never_moved:
            break  # `status` then parses few rows
    return tuple(found)


def rows(paths: RunPaths, attempts: Sequence[Usage]) -> Iterator[tuple[dict[str, Any], Usage | None]]:
    """The rows of the steps, each with its attempt: the one that had begun last before the row was written.

    None where that is not known. `attempts`: all of the run, oldest first. Raises OSError as `intact_rows` does.
    """
    starts = [unix_time(attempt.started) for attempt in attempts]
    for _, row in intact_rows(paths.metrics_path):
        written = row.get("time")
        begun = bisect_right(starts, written) if isinstance(written, float) else 0
        yield row, attempts[begun - 1] if begun else None


def changes(places: Sequence[StepPlace]) -> list[str]:
    """What a reader of the loss curve should know: nothing of a training that ran in one place."""
    return [place.change for place in places[1:]]
