"""A reward function in a process of its own, which can neither hang nor crash the one that trains."""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyperpod_ft import heartbeat
from hyperpod_ft.config.sections.rewards import Reward
from hyperpod_ft.processes import JsonProcess
from hyperpod_ft.shipped import importing_the_kit

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
        self._process: JsonProcess | None = None

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
        process, self._process = self._process, None
        return process.kill() if process else None

    def _start(self) -> None:
        if self._process:
            return
        argv = [sys.executable, "-m", "hyperpod_ft.rewards.caller", str(os.getpid())]
        self._process = JsonProcess(argv, importing_the_kit(os.environ))
        try:
            self._ask(self._settings, _START_SECONDS)
        except NoRewardError:
            self.close()
            raise

    def _ask(self, value: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        until = time.monotonic() + seconds

        def waiting() -> None:
            heartbeat.beat()  # it cannot hang here, however long it may take
            if time.monotonic() > until:
                self.close()
                raise NoRewardError(f"takes longer than {seconds:g} s")

        assert self._process
        heartbeat.beat()
        try:
            answer = self._process.ask(value, waiting)
        except EOFError:
            raise NoRewardError(f"ends its process with status {self.close()}") from None
        if "error" in answer:
            raise NoRewardError(answer["error"])
        return answer
