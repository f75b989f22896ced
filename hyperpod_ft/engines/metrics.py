"""What rank 0 tells about the steps: a row in metrics.jsonl and a line in the job's log."""

import contextlib
import json
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from hyperpod_ft import publish
from hyperpod_ft.engines.batches import Rows
from hyperpod_ft.engines.checkpoint_directory import Progress
from hyperpod_ft.run import Run


@dataclass(frozen=True)
class StepMetrics:
    """One row of metrics.jsonl."""

    step: int
    epoch: float  # passes over the training rows so far
    loss: float  # mean over the label tokens of this step
    learning_rate: float
    grad_norm: float  # before clipping
    tokens_per_second: float  # rows * max_length, padding included, since the row before
    samples_per_second: float  # rows of max_length tokens
    memory_mb: float  # peak of rank 0: the accelerator's memory, or the process's own on CPU; 1e6 bytes
    seconds: float  # in the training loop so far, over all attempts

    def line(self, steps: int, eta_seconds: float) -> str:
        """For example `step 12/300  loss 2.3100  lr 1.9e-04  grad 0.83  1,234 tok/s  eta 1m20s`."""
        return (
            f"step {self.step}/{steps}  loss {self.loss:.4f}  lr {self.learning_rate:.1e}  grad {self.grad_norm:.2f}"
            f"  {self.tokens_per_second:,.0f} tok/s  eta {duration(eta_seconds)}"
        )


class MetricsLog:
    """Keeps time on every rank; writes on rank 0, which alone calls `open` and `write`."""

    def __init__(
        self, run: Run, rows_per_step: int, rows: Rows, steps: int, progress: Progress, device: torch.device
    ) -> None:
        self._path, self._every = run.metrics, run.config.training.log_every_steps
        self._rows_per_step, self._rows, self._steps, self._device = rows_per_step, rows, steps, device
        self._begun_at = self._progress_at = self._written_at = time.monotonic()
        self._begun_step = self._written_step = progress.step

    def open(self) -> None:
        """Drop the rows of steps that will be trained again."""
        kept = [line for line, step in _lines(self._path) if step <= self._begun_step]
        publish.write_text(self._path, "".join(f"{line}\n" for line in kept))

    def advance(self, progress: Progress, loss: float) -> Progress:
        """The progress after one more step."""
        now = time.monotonic()
        seconds, self._progress_at = progress.seconds + now - self._progress_at, now
        first = loss if progress.first_loss is None else progress.first_loss
        return replace(progress, step=progress.step + 1, seconds=seconds, first_loss=first, last_loss=loss)

    def write(self, progress: Progress, learning_rate: float, grad_norm: float) -> None:
        """Write and print the step that ends here, when it is to be logged: the first, the last, every so many."""
        step = progress.step
        if step % self._every and step not in (1, self._steps):
            return
        assert progress.last_loss is not None
        now = time.monotonic()
        samples_per_second = (step - self._written_step) * self._rows_per_step / (now - self._written_at)
        row = StepMetrics(
            step=step,
            epoch=round(step * self._rows_per_step / len(self._rows), 4),
            loss=progress.last_loss,
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            tokens_per_second=round(samples_per_second * self._rows.max_length, 1),
            samples_per_second=round(samples_per_second, 3),
            memory_mb=round(peak_memory_mb(self._device), 1),
            seconds=round(progress.seconds, 3),
        )
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(row)) + "\n")
        pace = (now - self._begun_at) / (step - self._begun_step)
        print(row.line(self._steps, pace * (self._steps - step)), flush=True)
        self._written_at, self._written_step = now, step


def _lines(path: Path) -> Iterator[tuple[str, int]]:
    """Lines that are rows, with their steps: a kill may have cut one short, a failing disk have damaged one."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    for line in text.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if isinstance(step := json.loads(line)["step"], int):
                yield line, step


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory in MB (1e6 bytes): the accelerator's, or this process's resident set on CPU."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated() / 1e6
    # ru_maxrss is in KiB on Linux, in bytes on macOS
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def duration(seconds: float) -> str:
    """
    >>> duration(80), duration(5), duration(7260)
    ('1m20s', '5s', '2h01m')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes_left:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
