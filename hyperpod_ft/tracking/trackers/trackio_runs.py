"""Trackio: a database in `trackio` below `cluster.root` (TRACKIO_DIR), or a server of TRACKIO_SERVER_URL."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from hyperpod_ft.tracking.trackers.interface import Description, Row

_POLL_SECONDS = 0.05


class TrackioRun:
    """A run of a project, found again by its name. Trackio writes in the background: here it is waited for."""

    def __init__(self, given: Description) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(Path(given["root"]) / "trackio"))
        import trackio  # noqa: PLC0415 - reads the variable
        from trackio.sqlite_storage import SQLiteStorage  # noqa: PLC0415

        self._storage, self._project, self._name = SQLiteStorage, given["project"], given["key"]
        self._server = os.environ.get("TRACKIO_SERVER_URL") or os.environ.get("TRACKIO_SPACE_ID")
        self._run = trackio.init(
            project=self._project,
            name=self._name,
            config=dict(given["config"]),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    @property
    def where(self) -> str:
        return self._server or os.environ["TRACKIO_DIR"]

    def step(self) -> int | None:
        if self._server:
            return None
        return self._storage.get_last_step(self._project, run=self._name) or 0

    def publish(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log({name: value for name, value in row.items() if name != "step"}, step=int(row["step"]))
        while not self._server and (self.step() or 0) < rows[-1]["step"]:
            time.sleep(_POLL_SECONDS)

    def publish_final(self, final: Row, step: int) -> None:
        rows = [] if self._server else self._storage.get_logs(self._project, self._name)
        logged = {name for row in rows for name in row}
        if new := {name: value for name, value in final.items() if name not in logged}:
            self._run.log(new, step=step)

    def end(self, done: bool) -> None:
        self._run.finish()  # type: ignore[no-untyped-call]


def open_run(given: Description) -> TrackioRun:
    return TrackioRun(given)
