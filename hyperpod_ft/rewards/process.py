"""A reward function in a process of its own, which can neither hang nor crash the one that trains."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyperpod_ft import heartbeat
from hyperpod_ft.config.sections.rewards import Reward
from hyperpod_ft.shipped import PACKAGE

_BEAT_SECONDS = 1.0
_START_SECONDS = 120.0  # to import what the user's file imports


class NoRewardError(Exception):
    """Why an answer got no reward."""


class RewardProcess:
    """Calls one function; ends with `close`. After a call that hangs or crashes, the next one has a new process."""

    def __init__(self, reward: Reward, file: Path | None) -> None:
        """`file`: the copy of the user's file; None for one of the kit's functions."""
        self.reward = reward
        settings = reward.model_dump(include={"column", "json_schema", "pattern", "match", "min_length", "max_length"})
        self._settings = settings | {"function": reward.function_name, "file": str(file) if file else None}
        self._process: subprocess.Popen[bytes] | None = None
        self._read = b""

    def __call__(self, prompt: str, completion: str, columns: Mapping[str, Any]) -> float | None:
        """The reward of an answer; None where the function says so.

        Raises NoRewardError when the function raises an exception, returns no number, takes too long, or ends its
        process.
        """
        self._start()
        call = {"prompt": prompt, "completion": completion, "columns": columns}
        reward: float | None = self._ask(call, self.reward.timeout)["reward"]
        return reward

    def close(self) -> int | None:
        """End the process and its children. Returns its exit status; None if it was not running."""
        process, self._process, self._read = self._process, None, b""
        if process is None:
            return None
        # the pipes are closed, not read to their end: what left the process group may hold them
        with contextlib.suppress(ProcessLookupError, BrokenPipeError), process:
            os.killpg(process.pid, signal.SIGKILL)
        return process.returncode

    def _start(self) -> None:
        if self._process:
            return
        paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hyperpod_ft.rewards.caller", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # torchrun's signals to the rank's process group must not end it
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        try:
            self._ask(self._settings, _START_SECONDS)
        except NoRewardError:
            self.close()
            raise

    def _ask(self, value: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Write a line, and read one."""
        assert self._process and self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(value, default=str).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # reading says why
        output, until = self._process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self._read:
            heartbeat.beat()  # it cannot hang here, however long it may take
            left = max(0.0, until - time.monotonic())
            ready, _, _ = select.select([output], [], [], min(left, _BEAT_SECONDS))
            if not ready and left > _BEAT_SECONDS:
                continue
            if not ready:
                self.close()
                raise NoRewardError(f"takes longer than {seconds:g} s")
            received = os.read(output, 1 << 16)
            if not received:
                raise NoRewardError(f"ends its process with status {self.close()}")
            self._read += received
        line, _, self._read = self._read.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise NoRewardError(answer["error"])
        return answer
