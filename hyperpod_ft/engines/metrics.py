"""Rank 0's report of the steps: a row in metrics.jsonl, a line in the job's log, and facts for the record.

For every engine: imports no torch; callers pass what only the device knows.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hyperpod_ft import heartbeat, publish
from hyperpod_ft.checkpoint.sharded.description import RankDegrees
from hyperpod_ft.engines import sanity
from hyperpod_ft.engines.interface import TrainingProgress, TrainingTask
from hyperpod_ft.engines.throughput import Throughput
from hyperpod_ft.progress import format_duration
from hyperpod_ft.runs.results import expert_load
from hyperpod_ft.runs.results.expert_load import Loads
from hyperpod_ft.runs.results.metrics import OF_SOURCE, ROUGE, intact_rows

# of an objective's other metrics, those in the log
_IN_LINES = ("rewards/margins", "rewards/accuracies", "reward", "margin", "accuracy")


@dataclass(frozen=True)
class StepMetrics:
    """One row of metrics.jsonl."""

    step: int
    epoch: float  # passes over the training rows so far
    loss: float  # mean over the label tokens, or pairs, of this step
    learning_rate: float
    grad_norm: float  # before clipping
    validation_loss: float | None  # after this step; mean over the label tokens, or pairs, of the validation rows
    # since the row before, see throughput.Rates
    seconds_per_step: float
    rows_per_second: float
    documents_per_second: float | None
    tokens_per_second: float
    mfu: float | None
    memory_mb: float  # peak of rank 0: the accelerator's memory, or the process's own on CPU; 1e6 bytes
    seconds: float  # in the training loop so far, over all attempts
    time: float  # when the row was written: Unix time, seconds
    others: Mapping[str, float]  # the objective's other metrics, each under its own key

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self)
        del values["others"]
        return values | dict(self.others)

    def line(self, steps: int, eta_seconds: float) -> str:
        """For example `step 12/300  loss 2.3100  lr 1.9e-04  grad 0.83  1,234 tok/s  eta 1m20s`."""
        mfu = f"  MFU {self.mfu:.1%}" if self.mfu is not None else ""
        others = "".join(f"  {name} {self.others[name]:.4f}" for name in _IN_LINES if name in self.others)
        validation = f"  validation {self.validation_loss:.4f}" if self.validation_loss is not None else ""
        of_sources = {key: value for key, value in self.others.items() if key.startswith(OF_SOURCE)}
        validation += "".join(
            f"  validation/{key.removeprefix(OF_SOURCE)} {loss:.4f}" for key, loss in of_sources.items()
        )
        validation += "".join(f"  {name} {self.others[key]:.4f}" for key, name in ROUGE.items() if key in self.others)
        return (
            f"step {self.step}/{steps}  loss {self.loss:.4f}{validation}{others}  lr {self.learning_rate:.1e}"
            f"  grad {self.grad_norm:.2f}  {self.tokens_per_second:,.0f} tok/s{mfu}  eta {format_duration(eta_seconds)}"
        )


class MetricsLog:
    """Measures time on every rank, and writes on rank 0, which alone calls `open`, `announce` and `write`.

    `rows`: of an epoch; `steps`: of the whole run; `progress`: of the checkpoint that training resumes from.
    """

    def __init__(
        self,
        task: TrainingTask,
        throughput: Throughput,
        rows: int,
        steps: int,
        progress: TrainingProgress,
        peak_memory_mb: Callable[[], float],
    ) -> None:
        self._task, self._path, self._every = task, task.metrics_path, task.config.training.log_every_steps
        self._throughput, self._rows, self._steps, self._peak_memory_mb = throughput, rows, steps, peak_memory_mb
        # an accelerator's work leaves no trace in the time of a CPU, and the parts of a model may differ
        degrees = task.layout.degrees
        if not task.config.instance.has_accelerators and degrees.pipeline_parallel == degrees.expert_parallel == 1:
            heartbeat.count_work()
        heartbeat.beat("step", progress.step)
        self._begun_at = self._progress_at = time.monotonic()
        self._begun_step = progress.step
        # when, of which step, and the tokens counted until then: the last two
        self._rows_written = [(self._begun_at, progress.step, progress.tokens)] * 2

    def open(self) -> None:
        """Drop the rows of steps that will be trained again."""
        kept = [line for line, row in intact_rows(self._path) if row["step"] <= self._begun_step]
        publish.write_text(self._path, "".join(f"{line}\n" for line in kept))

    def announce(self, parameters: str, placement: str) -> None:
        """Print what begins: `parameters` says how many are trained, `placement` how they are divided and where."""
        training, degrees, work = self._task.config.training, self._task.layout.degrees, self._throughput
        print(
            f"train: {training.method} of {parameters} parameters in {training.precision} on {degrees.world_size} ranks"
            f" ({degrees}, {placement}); {self._steps} steps of {work.rows_per_step} rows x {work.max_length} tokens,"
            f" {self._rows} rows",
            flush=True,
        )
        if self._begun_step:
            print(f"train: resuming from step {self._begun_step}", flush=True)

    def advance(
        self,
        progress: TrainingProgress,
        loss: float,
        others: Mapping[str, float] | None = None,
        loads: Loads | None = None,
    ) -> TrainingProgress:
        """The progress after one more step; `others`: its other metrics, `loads`: of a mixture's experts."""
        heartbeat.beat("step", progress.step + 1)
        now = time.monotonic()
        seconds, self._progress_at = now - self._progress_at, now
        warming_up = progress.step == self._begun_step
        return replace(
            progress,
            step=progress.step + 1,
            seconds=progress.seconds + seconds,
            first_steps_seconds=progress.first_steps_seconds + (seconds if warming_up else 0.0),
            first_loss=loss if progress.first_loss is None else progress.first_loss,
            last_loss=loss,
            smoothed_loss=sanity.smoothed(progress.smoothed_loss, loss),
            metrics={**progress.metrics, **(others or {})},
            first_expert_load=progress.first_expert_load or loads or {},
            last_expert_load=loads or {},
            peak_operations=progress.peak_operations + seconds * self._throughput.peak_flops,
        )

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Leave the time that the block takes out of rates and of the training time."""
        begun = time.monotonic()
        with heartbeat.during("validation"):
            yield
        seconds = time.monotonic() - begun
        self._begun_at += seconds
        self._progress_at += seconds
        self._rows_written = [(at + seconds, step, tokens) for at, step, tokens in self._rows_written]

    def write(
        self,
        progress: TrainingProgress,
        learning_rate: float,
        grad_norm: float,
        validation_loss: float | None = None,
        others: Mapping[str, float] | None = None,
        *,
        nothing_launched: bool = False,
    ) -> None:
        """Write and print the step that ends here, with the objective's `others` metrics.

        Only if it is the first, the last, a multiple of `log_every_steps`, or has a validation loss. `nothing_launched`
        since the step before was read: a device that waits for launches may have ended both at that time, so the rates
        are those since the row before.
        """
        step = progress.step
        if step % self._every and step not in (1, self._steps) and validation_loss is None:
            return
        assert progress.last_loss is not None
        now = time.monotonic()
        since, written, tokens = self._rows_written[0 if nothing_launched else 1]
        counted = None if progress.tokens is None else progress.tokens - (tokens or 0)
        rates = self._throughput.rates(step - written, now - since, counted)
        row = StepMetrics(
            step=step,
            epoch=round(step * self._throughput.rows_per_step / self._rows, 4),
            loss=progress.last_loss,
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            validation_loss=validation_loss,
            memory_mb=round(self._peak_memory_mb(), 1),
            seconds=round(progress.seconds, 3),
            time=round(time.time(), 3),
            others=others or {},
            **asdict(rates),
        )
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row.as_dict()) + "\n")
        pace = (now - self._begun_at) / (step - self._begun_step)
        print(row.line(self._steps, pace * (self._steps - step)), flush=True)
        self._rows_written = [self._rows_written[1], (now, step, progress.tokens)]

    def facts(self, progress: TrainingProgress, trainable_parameters: int) -> dict[str, Any]:
        """The facts of a finished training for its record, over all attempts that its checkpoints come from.

        Rates cover the whole time in the training loop, including checkpoints and first steps;
        `seconds_per_step` is the median of the rows of metrics.jsonl, and `warm_up_seconds` the time beyond it that the
        first step of each attempt took, usually to compile.
        """
        trained = progress.step * self._throughput.rows_per_step
        rates = None
        if seconds := progress.seconds:
            everywhere = replace(self._throughput, peak_flops=progress.peak_operations / seconds)
            rates = everywhere.rates(progress.step, seconds, progress.tokens)
        median = _median_step_seconds(self._task.metrics_path)
        warm_up = None
        if median is not None:
            warm_up = max(0.0, progress.first_steps_seconds - (1 + len(progress.resumed_from)) * median)
        return {
            "steps": progress.step,
            "epochs": round(trained / self._rows, 4),
            "first_loss": progress.first_loss,
            "final_loss": progress.last_loss,
            "rows": trained,  # packed, of all epochs
            # padding included
            "tokens": trained * self._throughput.max_length if progress.tokens is None else progress.tokens,
            "seconds": round(progress.seconds, 3),  # in the training loop
            **(asdict(rates) if rates else {}),
            "seconds_per_step": median,
            "warm_up_seconds": None if warm_up is None else round(warm_up, 3),
            "resumed_from": list(progress.resumed_from),
            "base_validation_loss": progress.base_validation_loss,
            "validation_loss": progress.validation_loss,
            "best_validation_loss": progress.best_validation_loss,
            "best_step": progress.best_step,
            "stopped_early": progress.stopped_early,
            **progress.metrics,
            **expert_load.facts(progress.first_expert_load, progress.last_expert_load),
            "trainable_parameters": trainable_parameters,
            **RankDegrees.model_validate(self._task.layout.degrees, from_attributes=True).model_dump(),
        }


def _median_step_seconds(path: Path) -> float | None:
    """Over all rows except that of step 1, which warms up; None without any."""
    rows = (row for _, row in intact_rows(path) if row["step"] > 1)
    found = [row["seconds_per_step"] for row in rows if "seconds_per_step" in row]
    return round(statistics.median(found), 4) if found else None
