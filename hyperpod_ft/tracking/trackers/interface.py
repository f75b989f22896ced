"""What every tracker's module offers publisher.py: `open_run(given)`, which returns a `TrackerRun`."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

FINAL = "final/"  # how the names of final figures begin
Row = dict[str, float]
Description = Mapping[str, Any]  # tracking/content.py makes it


class TrackerRun(Protocol):
    """A training in a tracker, created or opened again. A method that fails raises anything.

    After a failure or a kill the run is opened again by a new process, which asks it for its step.
    """

    @property
    def where(self) -> str:
        """Where people find it: a URL or a directory."""
        ...

    def step(self) -> int | None:
        """The newest step of which the tracker has the whole row, 0 if none; None if it cannot tell."""
        ...

    def publish(self, rows: Sequence[Row]) -> None:
        """Publish rows in ascending steps. Returns once the tracker, or its own files on disk, have them."""
        ...

    def publish_final(self, final: Row, step: int) -> None:
        """Publish final figures; `step`: the last one of the training."""
        ...

    def end(self, done: bool) -> None:
        """Flush and close. `done`: the training is finished; otherwise it may be continued."""
        ...
