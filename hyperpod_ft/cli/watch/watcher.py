"""What is seen of a run, gathered in a thread of its own: keys work while a launcher or a volume takes its time."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyperpod_ft.cli.output.show_runs import cancelled_lines, created_line
from hyperpod_ft.cli.output.tables import clock
from hyperpod_ft.cli.watch.loss_history import LossHistory
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch import submit
from hyperpod_ft.launch.follow import choose_stage, fetch_log, follow
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.status import RunStatus, StageStatus, with_progress
from hyperpod_ft.runs.results.log_text import tail
from hyperpod_ft.runs.run import Run

_FILES_SECONDS = 1.0  # between two looks at logs and metrics; the launcher is asked less often
_LOG_LINES = 1000


@dataclass(frozen=True)
class Picture:
    """A run at one moment."""

    status: RunStatus
    losses: tuple[float, ...] = ()  # of all logged steps
    newest: Mapping[str, Any] = field(default_factory=dict)  # the newest row of metrics.jsonl
    validation: tuple[int, float] | None = None  # the newest validation loss, with its step
    seconds_per_step: float | None = None  # of late
    stage: str = ""  # whose log it is
    log: tuple[str, ...] = ()  # its last lines
    log_path: str = ""
    messages: tuple[str, ...] = ()  # newest last
    cancelling: bool = False

    @classmethod
    def unknown(cls, run: Run) -> "Picture":
        """Before the first look."""
        stages = tuple(StageStatus(stage.name, "unknown") for stage in run.plan.stages)
        return cls(RunStatus(run.config.name, str(run.directory), "", "unknown", stages), stage=stages[0].stage)


class _StopError(Exception):
    """The user left."""


class Watcher:
    """Follows a run from `start` to `stop`, or until the run ends. Calls `changed` for every new picture.

    `error`: what ended the following early; `ended`: whether the run did.
    """

    def __init__(self, run: Run, launchers: Launchers, changed: Callable[[], None]) -> None:
        self.run, self._launchers, self._changed = run, launchers, changed
        self._losses = LossHistory(run.metrics_path)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._request = threading.Event()
        self._stage, self._cancel, self._stop = "", False, False
        self._status: RunStatus | None = None
        self.picture: Picture | None = None
        self.messages: list[str] = []
        self.error: BaseException | None = None
        self.ended = False

    def start(self) -> None:
        self._thread.start()

    def show_log(self, stage: str) -> None:
        """Show the log of this stage from now on; empty: of the one that failed or is at work."""
        if stage != self._stage:
            self._stage = stage
            self._request.set()

    def cancel(self) -> None:
        """Cancel the run's jobs. `stop` waits for that."""
        self._cancel = True
        self._request.set()

    @property
    def cancelling(self) -> bool:
        """Whether the jobs are yet to be cancelled."""
        return self._cancel

    def stop(self) -> None:
        self._stop = True
        self._request.set()
        self._thread.join(None if self._cancel else _FILES_SECONDS)

    def _follow(self) -> None:
        try:
            for current in follow(self.run, self._launchers, self._pause):
                if current.created:
                    self._say(created_line(current.created))
                if current.note:
                    self._say(current.note)
                # states are unknown while a launcher does not answer: the last known ones stay
                self._status = self._status if current.note and self._status else current
                self._fetch_log(self._status)
                self._look()
            self.ended = True
        except _StopError:
            return
        except BaseException as error:
            self.error = error
        self._changed()

    def _pause(self, seconds: float) -> None:
        """Look at the files meanwhile, and do what the user asks for."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._request.wait(min(left, _FILES_SECONDS))
            self._request.clear()
            if self._cancel:
                self._cancel_jobs()
                return
            if self._stop:
                raise _StopError
            self._look()

    def _cancel_jobs(self) -> None:
        try:
            for line in cancelled_lines(submit.cancel(self.run, self._launchers)):
                self._say(line)
        except UserError as error:
            self._say(f"not cancelled: {error}")
        finally:
            self._cancel = False

    def _fetch_log(self, current: RunStatus) -> None:
        try:
            fetch_log(self.run, self._launchers, choose_stage(current, self._stage or None))
        except UserError as error:
            self._say(str(error))

    def _look(self) -> None:
        if self._status is None:
            return
        current = with_progress(self.run, self._status)
        self._losses.read()
        stage = choose_stage(current, self._stage or None)
        path = self.run.log_here(stage.stage, stage.job_id) if stage.job_id else None
        self.picture = Picture(
            status=current,
            losses=tuple(self._losses.values),
            newest=self._losses.newest,
            validation=self._losses.validation,
            seconds_per_step=self._losses.seconds_per_step,
            stage=stage.stage,
            log=tuple(tail(Path(path), _LOG_LINES)) if path else (),
            log_path=str(path or ""),
            messages=tuple(self.messages[-2:]),
        )
        self._changed()

    def _say(self, message: str) -> None:
        if not self.messages or not self.messages[-1].endswith(f"  {message}"):
            self.messages.append(f"{clock()}  {message}")
