"""A stage's script in a container: what it prints is shown, logged and searched for its error; signals reach it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Mapping

from hyperpod_ft.runs.job_files import NOTICE, TERMINATED_STATUS, shell_status

# Their scripts become the supervisor, which alone must be signalled: torchrun would kill its ranks half a minute after
# SIGTERM. The programs of other stages end at once.
SUPERVISED = ("precompile", "train")
TRAINING_STAGE = "train"  # the stage that saves and ends when the time limit is close
# Of the 120 s between SIGTERM and SIGKILL: some are left to send what was saved.
SECONDS_TO_END = 100
_SECONDS_TO_READ = 5  # what a script has printed, when processes that outlive it keep its output open


class Stop:
    """Whether the job has to end: SIGTERM, or the notice of its time limit, which a timer gives."""

    def __init__(self, notice_after: float) -> None:
        self.requested = self.noticed = False
        self._requested_at = 0.0
        self._script: Script | None = None
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGALRM, self._on_notice)
        self.notice_in(notice_after)

    def notice_in(self, seconds: float) -> None:
        """Give the notice after this time, and not when it was to be given before."""
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def _on_stop(self, *_: object) -> None:
        self._requested_at = self._requested_at or time.monotonic()
        self.requested = True
        if self._script:
            self._script.stop()

    def _on_notice(self, *_: object) -> None:
        self.noticed = True
        if self._script:
            self._script.notice()

    def expired(self) -> bool:
        """Whether the time to end in is over."""
        return self.requested and time.monotonic() - self._requested_at > SECONDS_TO_END

    def watch(self, script: Script) -> None:
        """Send the signals to this script from now on; at once, if they have arrived."""
        self._script = script
        if self.requested:
            script.stop()
        elif self.noticed:
            script.notice()


class Script:
    """One run of a stage's script."""

    def __init__(self, path: Path, stage: str, variables: Mapping[str, str], log: Path | None = None) -> None:
        """Start it. `log`, on the first host: what it prints is appended there too."""
        self.stage = stage
        self._on_first_host = log is not None
        self.error = ""  # its last line marked as an error
        self.last_line = ""
        self.process = subprocess.Popen(
            ["bash", str(path)],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout, log), daemon=True)
        self._reader.start()

    def _read(self, output: IO[bytes], log: Path | None) -> None:
        file = None
        with suppress(OSError):  # a full volume is the stage's own error
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                file = log.open("ab", buffering=0)
        for line in output:
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
            if file is not None:
                with suppress(OSError):
                    file.write(line)
            text = line.decode(errors="replace").strip()
            if text.startswith("error: "):
                self.error = text[len("error: ") :]
            self.last_line = text or self.last_line

    def stop(self) -> None:
        """SIGTERM: a training run saves a checkpoint, other stages end."""
        with suppress(ProcessLookupError):
            if self.stage not in SUPERVISED:
                os.killpg(self.process.pid, signal.SIGTERM)
            elif self._on_first_host:
                self.process.terminate()
            else:
                self.notice()

    def notice(self) -> None:
        """The notice of the time limit: a training run saves and ends."""
        if self.stage == TRAINING_STAGE:
            self.process.send_signal(NOTICE)

    def wait(self, stop: Stop) -> int:
        """Wait for the exit status, as a shell reports it; 143 when the script does not end in time after SIGTERM."""
        stop.watch(self)
        while not stop.expired():
            with suppress(subprocess.TimeoutExpired):
                status = self.process.wait(0.2)
                self._reader.join(_SECONDS_TO_READ)
                return shell_status(status)
        return TERMINATED_STATUS
