"""The follower's side of publisher.py: starts it, sends requests, and kills it when it does not answer."""

import contextlib
import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from hyperpod_ft.config.secrets import without_secrets
from hyperpod_ft.runs.run import Run
from hyperpod_ft.shipped import PACKAGE

_POLL_SECONDS = 0.2
_LOG_SECONDS = 3  # for the rest of its output; a process that has left its session may keep the pipe open


class PublishingError(Exception):
    """A tracker that failed, or did not answer in time; the message has no secrets."""


class Publisher:
    """A running publisher.py of one tracker.

    `deadline`: a moment of time.monotonic() by which it must have answered; asked again while an answer is awaited.
    """

    def __init__(self, run: Run, tracker: str, deadline: Callable[[], float]) -> None:
        self._environment = {**os.environ, **run.config.cluster.environment}
        path = os.pathsep.join(filter(None, (str(PACKAGE.parent), self._environment.get("PYTHONPATH"))))
        self._deadline = deadline
        python = run.paths.tracker_python(tracker)
        try:
            self._process = subprocess.Popen(
                [str(python), "-m", "hyperpod_ft.tracking.publisher", tracker],
                cwd=run.paths.tracking,
                env={**self._environment, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise PublishingError(f"no interpreter at {python}: {error.strerror}; run: hyperpod-ft track") from error
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        log = run.paths.logs / f"tracking-{tracker}.log"
        self._log = threading.Thread(target=self._keep_log, args=(log, self._process.stderr), daemon=True)
        self._log.start()

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to a request. Raises PublishingError."""
        self._send(json.dumps(request).encode() + b"\n")
        try:
            answer: dict[str, Any] = json.loads(self._receive())
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
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(max(0.0, min(self._deadline() - time.monotonic(), 5.0)))
        except subprocess.TimeoutExpired:
            self.kill()
        else:
            self._log.join(_LOG_SECONDS)

    def kill(self) -> None:
        """End the process and those of its session at once; what it printed is then in its log."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.join(_LOG_SECONDS)

    def _send(self, data: bytes) -> None:
        pipe = self._process.stdin.fileno()  # type: ignore[union-attr]
        while data:
            self._wait(writing=pipe)
            try:
                data = data[os.write(pipe, data) :]
            except BrokenPipeError:
                raise PublishingError("the tracker's process has ended; see its log") from None

    def _receive(self) -> bytes:
        pipe, answer = self._process.stdout.fileno(), b""  # type: ignore[union-attr]
        while not answer.endswith(b"\n"):
            self._wait(reading=pipe)
            content = os.read(pipe, 1 << 16)
            if not content:
                raise PublishingError("the tracker's process has ended; see its log")
            answer += content
        return answer

    def _wait(self, reading: int | None = None, writing: int | None = None) -> None:
        readers, writers = ([] if pipe is None else [pipe] for pipe in (reading, writing))
        while not any(select.select(readers, writers, [], _POLL_SECONDS)):
            if time.monotonic() > self._deadline():
                raise PublishingError("the tracker did not answer in time")

    def _keep_log(self, path: Path, output: IO[bytes]) -> None:
        with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as log:
            for line in output:
                log.write(without_secrets(line.decode("utf-8", "replace"), self._environment))
                log.flush()
        for _ in output:  # of a full volume: the process must not wait for a reader
            pass
