"""A view of a run on the terminal, from the first look until the run ends or the user leaves."""

import time
from pathlib import Path

from hyperpod_ft.cli.output.show_runs import cancelled_lines
from hyperpod_ft.cli.output.tables import clock
from hyperpod_ft.cli.watch import screen, terminal
from hyperpod_ft.cli.watch.screen import LossHistory
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch import submit
from hyperpod_ft.launch.follow import choose_stage, follow, log_file
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.status import RunStatus, status_of, with_progress
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.runs.results.log_text import tail
from hyperpod_ft.runs.run import Run

_LOOK_SECONDS = 1.0  # between two looks at logs and metrics; the launcher is asked less often


class _LeaveError(Exception):
    """The user leaves."""


def watch(run: Run, launchers: Launchers) -> tuple[RunStatus, bool]:
    """The last status, and whether the run ended; otherwise the user left.

    Prints what happened meanwhile, after the terminal is as it was. Raises what ended the following early: UserError,
    or KeyboardInterrupt and SystemExit of a signal.
    """
    session = _Session(run, launchers)
    try:
        with terminal.opened() as session.terminal:
            session.follow()
    except _LeaveError:
        return session.status, False
    finally:
        for message in session.messages:
            print(message)
    return session.status, True


class _Session:
    terminal: terminal.Terminal

    def __init__(self, run: Run, launchers: Launchers) -> None:
        self._run, self._launchers = run, launchers
        self._losses = LossHistory(run.paths.metrics_path)
        self._stage: str | None = None  # whose log is shown; None: that of the one that failed or is at work
        self._whole_log = self._asks = False
        self.status = status_of(run, launchers, run.journal.latest_jobs(), None)
        self.messages: list[str] = []

    def follow(self) -> None:
        """Draw, and obey keys between two looks, until the run ends."""
        # what the records say is shown while the launcher is asked
        self._draw("asking for the states of its jobs")
        for current in follow(self._run, self._launchers, self._say, self._pause):
            if current.note:  # the last known states stay while a launcher does not answer
                self._say(current.note)
            else:
                self.status = current
            try:
                log_file(self._run, self._launchers, choose_stage(self.status, self._stage))
            except UserError as error:
                self._say(str(error))
            self._draw()

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            for key in self.terminal.keys(min(left, _LOOK_SECONDS)):
                if self._asks and key == "y":
                    self._cancel()
                    return
                self._press(key)
            self._draw()

    def _press(self, key: str) -> None:
        if self._asks:
            self._asks = False
        elif key == "q":
            raise _LeaveError
        elif key == "c":
            self._asks = True
        elif key == "enter":
            self._whole_log = not self._whole_log
        elif key == "escape":
            self._stage, self._whole_log = None, False
        elif key in ("up", "down"):
            stages = [stage.stage for stage in self.status.stages]
            place = stages.index(choose_stage(self.status, self._stage).stage) + (1 if key == "down" else -1)
            self._stage = stages[min(max(place, 0), len(stages) - 1)]

    def _cancel(self) -> None:
        self._asks = False
        self._draw("Cancelling…")
        try:
            for line in cancelled_lines(submit.cancel(self._run, self._launchers)):
                self._say(line)
        except UserError as error:
            self._say(f"not cancelled: {error}")

    def _draw(self, doing: str = "") -> None:
        self._losses.read()
        current = with_progress(self._run, self.status)
        stage = choose_stage(current, self._stage)
        path = str(self._run.journal.log_here(stage.stage, stage.job_id) or "") if stage.job_id else ""
        height = self.terminal.screen.console.height
        picture = screen.Picture(
            status=current,
            losses=self._losses,
            stage=stage.stage,
            log=tail(Path(path), height) if path else [],
            log_path=path,
            messages=[doing] if doing else self.messages[-2:],
            whole_log=self._whole_log,
            asks=self._asks,
        )
        self.terminal.screen.update(screen.draw(picture, utc_now(), height), refresh=True)

    def _say(self, message: str) -> None:
        if not self.messages or not self.messages[-1].endswith(f"  {message}"):
            self.messages.append(f"{clock()}  {message}")
