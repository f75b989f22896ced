"""Follows metrics.jsonl, and publishes what a tracker does not have yet: one thread for each tracker.

    python -m hyperpod_ft.tracking.follower RUN_DIR      ends a short time after its standard input, or after SIGTERM

The supervisor of a training starts it on the first node. When the supervisor dies, that input ends too.

Nothing here can stop or slow a training run: it is a program of its own, with a low priority, and each tracker is a
process of its own below it, which is killed when it hangs and tried again later, with longer and longer pauses. What a
tracker missed it gets with the next row that it takes, at the end of the training, or from `hyperpod-ft track`.

A row is published once: TrackerState says how far a tracker got, and a tracker that can tell is asked when it is
opened. Steps that a restarted training makes again are not published again.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from hyperpod_ft import publish
from hyperpod_ft.errors import EXIT_USER_ERROR, UserError, print_error
from hyperpod_ft.runs.run import Run
from hyperpod_ft.tracking.content import NewRows, TrackerState, description, final
from hyperpod_ft.tracking.publisher_process import Publisher, PublishingError
from hyperpod_ft.tracking.trackers.interface import Row

_POLL_SECONDS = 2.0
_PATIENCE_SECONDS = 120.0  # for one answer; trackers repeat requests themselves
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 5.0, 300.0
_ROWS_OF_A_REQUEST = 200
_LAST_SECONDS = 30.0  # accelerators wait for it
_LAST_SECONDS_OF_CANCELLED = 10.0  # of the 20 or 30 s between SIGTERM and SIGKILL
_LAST_ATTEMPTS = 2  # the first may find a process that hangs


@dataclass
class Shutdown:
    """Whether to publish a last time and end, and by when."""

    _begun: threading.Event = field(default_factory=threading.Event)
    _deadline: float = float("inf")  # of time.monotonic()

    def begin(self, seconds: float) -> None:
        """End within that time; a second call can only shorten it."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)
        self._begun.set()

    @property
    def has_begun(self) -> bool:
        return self._begun.is_set()

    def wait(self, seconds: float) -> None:
        self._begun.wait(seconds)

    def limited(self, deadline: float) -> float:
        return min(deadline, self._deadline)


class Follower:
    """Publishes a run to one tracker."""

    def __init__(self, run: Run, tracker: str, shutdown: Shutdown) -> None:
        self._run, self._tracker, self._shutdown = run, tracker, shutdown
        self.state = TrackerState("")  # until it is read
        self._rows = NewRows(run.paths.metrics_path)
        self._publisher: Publisher | None = None
        self._deadline = float("inf")  # of the request that is awaited
        self._pause, self._not_before = _FIRST_PAUSE_SECONDS, 0.0

    def follow(self) -> None:
        """Publish until the shutdown begins, and then a last time."""
        with contextlib.ExitStack() as stack:
            if not self._begin(stack):
                return
            last = False
            while not last:
                last = self._shutdown.has_begun  # asked before the file is read: rows that are there by then are seen
                for _ in range(_LAST_ATTEMPTS if last else 1):
                    if self._attempt(last):
                        break
                if not last:
                    self._shutdown.wait(_POLL_SECONDS)
            self._end()

    def _begin(self, stack: contextlib.ExitStack) -> bool:
        """Wait until the state can be read and no other process publishes to this tracker, or the shutdown begins."""
        path = self._run.paths.tracking / f"{self._tracker}.lock"
        problem = ""
        while True:
            try:
                self.state = TrackerState.read(self._run, self._tracker)
                with contextlib.ExitStack() as held:
                    held.enter_context(publish.lock(path, patience=0))
                    self.state = TrackerState.read(self._run, self._tracker)
                    stack.push(held.pop_all())
                    return True
            except (UserError, OSError) as error:
                if problem != str(error):
                    problem = str(error)
                    self._report(problem)
                if self._shutdown.has_begun:
                    self.state = replace(self.state, problem=problem)
                    return False
            self._shutdown.wait(_POLL_SECONDS)

    def _attempt(self, last: bool) -> bool:
        """Publish what is missing; False if that failed. Between failures it pauses, except before the shutdown."""
        if time.monotonic() < self._not_before and not last:
            return False
        try:
            self._publish_missing()
        except (PublishingError, UserError, OSError) as error:
            self._failed(str(error))
            return False
        self._pause = _FIRST_PAUSE_SECONDS
        return True

    def _publish_missing(self) -> None:
        rows, figures = self._rows.after(self.state.step), self._new_figures()
        if rows or figures:
            self._publish(rows, figures)
        if self.state.problem:
            self._keep(problem="")

    def _publish(self, rows: Sequence[Row], figures: Row) -> None:
        if self._publisher is None:
            self._open()
            rows = self._rows.after(self.state.step)
        for batch in _batches(rows):
            self._ask(rows=batch)
            self._keep(step=int(batch[-1]["step"]))
        if figures:
            self._ask(final=figures, step=self.state.step)
            self._keep(final={**self.state.final, **figures})

    def _new_figures(self) -> Row:
        return {name: value for name, value in final(self._run).items() if self.state.final.get(name) != value}

    def _open(self) -> None:
        self._keep()  # the key: a follower after this one must find the same run
        self._publisher = Publisher(self._run, self._tracker, lambda: self._shutdown.limited(self._deadline))
        opened = self._ask(open=description(self._run, self.state.key))
        step: int = self.state.step if opened["step"] is None else opened["step"]
        if step < self.state.step:
            self._rows = NewRows(self._run.paths.metrics_path)
        self._keep(step=step, where=opened["where"])

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._publisher is not None
        self._deadline = time.monotonic() + _PATIENCE_SECONDS
        return self._publisher.ask(**request)

    def _keep(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)
        self.state.write(self._run, self._tracker)

    def _failed(self, problem: str) -> None:
        if self._publisher is not None:
            self._publisher.kill()
            self._publisher = None
        self._not_before = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
        if problem != self.state.problem:
            self._report(problem)
        with contextlib.suppress(OSError):
            self._keep(problem=problem)

    def _report(self, problem: str) -> None:
        print(f"tracking: {self._tracker}: {problem}; training is not affected", flush=True)

    def _end(self) -> None:
        if self._publisher is None:
            return
        try:
            self._ask(end=self._run.journal.is_done("train"))
        except (PublishingError, UserError, OSError) as error:
            self._failed(str(error))
        else:
            self._publisher.close()


def follow(run: Run, shutdown: Shutdown) -> dict[str, TrackerState]:
    """Publish to all trackers of the run file until the shutdown is over; returns how far each got."""
    run.paths.tracking.mkdir(parents=True, exist_ok=True)
    run.paths.logs.mkdir(exist_ok=True)
    followers = {tracker: Follower(run, tracker, shutdown) for tracker in dict.fromkeys(run.config.tracking.trackers)}
    threads = [threading.Thread(target=follower.follow, name=name) for name, follower in followers.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {tracker: follower.state for tracker, follower in followers.items()}


def _batches(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    for start in range(0, len(rows), _ROWS_OF_A_REQUEST):
        yield rows[start : start + _ROWS_OF_A_REQUEST]


def main() -> int:
    """Run the command line; returns the exit status."""
    shutdown = Shutdown()

    def cancel(*_: int | FrameType | None) -> None:
        shutdown.begin(_LAST_SECONDS_OF_CANCELLED)

    def await_end_of_input() -> None:
        sys.stdin.buffer.read()
        shutdown.begin(_LAST_SECONDS)

    signal.signal(signal.SIGTERM, cancel)
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    try:
        run = Run.open(Path(sys.argv[1]))
    except UserError as error:
        print_error("tracking", str(error))
        return EXIT_USER_ERROR
    threading.Thread(target=await_end_of_input, daemon=True).start()
    os.nice(10)
    for tracker, state in follow(run, shutdown).items():
        lag = f"; {state.problem}; to catch up: hyperpod-ft track {run.paths.directory}" if state.problem else ""
        print(f"tracking: {tracker}: published to step {state.step} {state.where}{lag}", flush=True)
    # the thread that reads stdin may still wait for its end
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
