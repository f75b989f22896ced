"""The follower's side of publisher.py: starts it, sends requests, and kills it when it does not answer."""

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from hyperpod_ft.config.secrets import without_secrets
from hyperpod_ft.processes import JsonProcess
from hyperpod_ft.runs.run import Run
from hyperpod_ft.shipped import importing_the_kit

_LOG_SECONDS = 3  # for the rest of its output; a process that has left its session may keep the pipe open


class PublishingError(Exception):
    """A tracker that failed, or did not answer in time; the message has no secrets."""


class Publisher:
    """A running publisher.py of one tracker.

    `deadline`: a moment of time.monotonic() by which it must have answered; asked again while an answer is awaited.
    """

    def __init__(self, run: Run, tracker: str, deadline: Callable[[], float]) -> None:
        self._environment = {**os.environ, **run.config.cluster.environment}
        self._deadline = deadline
        python = run.paths.tracker_python(tracker)
        try:
            self._process = JsonProcess(
                [str(python), "-m", "hyperpod_ft.tracking.publisher", tracker],
                importing_the_kit(self._environment),
                cwd=run.paths.tracking,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            raise PublishingError(f"no interpreter at {python}: {error.strerror}; run: hyperpod-ft track") from error
        log = run.paths.logs / f"tracking-{tracker}.log"
        self._log = threading.Thread(target=self._keep_log, args=(log, self._process.process.stderr), daemon=True)
        self._log.start()

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to a request. Raises PublishingError."""
        try:
            answer = self._process.ask(request, self._waiting)
        except EOFError:
            raise PublishingError("the tracker's process has ended; see its log") from None
        except ValueError:
            raise PublishingError("the tracker's process printed something else than an answer") from None
        if "where" in answer:  # the address of a server or a database may have a password
            answer["where"] = without_secrets(answer["where"], self._environment)
        if problem := answer.get("problem"):
            raise PublishingError(without_secrets(problem, self._environment))
        return answer

    def close(self) -> None:
        """End the process, by SIGKILL if it does not end by itself in time."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.process.wait(max(0.0, min(self._deadline() - time.monotonic(), 5.0)))
        except subprocess.TimeoutExpired:
            self.kill()
        else:
            self._log.join(_LOG_SECONDS)

    def kill(self) -> None:
        """End the process and those of its session at once; what it printed is then in its log."""
        self._process.kill()
        self._log.join(_LOG_SECONDS)

    def _waiting(self) -> None:
        if time.monotonic() > self._deadline():
            raise PublishingError("the tracker did not answer in time")

    def _keep_log(self, path: Path, output: IO[bytes]) -> None:
        with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as log:
            for line in output:
                log.write(without_secrets(line.decode("utf-8", "replace"), self._environment))
                log.flush()
        for _ in output:  # of a full volume: the process must not wait for a reader
            pass
