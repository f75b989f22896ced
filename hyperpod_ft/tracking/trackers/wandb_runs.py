"""Weights & Biases, online or offline (WANDB_MODE). Its key and server come from WANDB_API_KEY and WANDB_BASE_URL.

wandb writes each row to a file in the run's directory first, from which `wandb sync` can upload it. A server takes a
step only once: it drops rows whose step is not above the newest.
"""

import time
from collections.abc import Sequence

import wandb

from hyperpod_ft.tracking.trackers.interface import Description, Row

# wandb's own process writes what it was given to the file at this interval; by default only every 15 s
_FLUSH_SECONDS = 0.2


class WandbRun:
    """A run, resumed by its id. Each process that publishes offline leaves a directory of its own."""

    def __init__(self, given: Description) -> None:
        settings = wandb.Settings(
            # nothing but what is published: no output, code, packages or load of this process's machine
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            disable_job_creation=True,
            x_disable_stats=True,
            x_save_requirements=False,
            x_transaction_log_flush_interval=_FLUSH_SECONDS,
        )
        self._run = wandb.init(
            project=given["project"],
            id=given["key"],
            name=given["name"],
            config=dict(given["config"]),
            dir=given["directory"],
            resume="allow",
            settings=settings,
        )

    @property
    def where(self) -> str:
        return str(self._run.url or self._run.settings.sync_dir)

    def step(self) -> int | None:
        # an offline run cannot know what earlier processes wrote
        if self._run.offline:
            return None
        return max(0, self._run.starting_step - 1)

    def publish(self, rows: Sequence[Row]) -> None:
        for row in rows:
            values = {name: value for name, value in row.items() if name != "step"}
            # commit: a row with a step would otherwise be kept in memory until the next one
            self._run.log(values, step=int(row["step"]), commit=True)
        self._flush()

    def publish_final(self, final: Row, step: int) -> None:
        self._run.summary.update(final)
        self._flush()

    def end(self, done: bool) -> None:
        self._run.finish(exit_code=0 if done else 1)

    def _flush(self) -> None:
        """Wait until all that was given is in the file: wandb's process answers in order, and then writes it."""
        assert self._run.step >= 0
        time.sleep(2 * _FLUSH_SECONDS)


def open_run(given: Description) -> WandbRun:
    return WandbRun(given)
