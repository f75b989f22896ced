"""What a training reports of itself, the same for every engine."""

import json
import time
from collections.abc import Callable

import pytest

from hyperpod_ft.engines.interface import TrainingProgress
from hyperpod_ft.engines.metrics import MetricsLog
from hyperpod_ft.engines.throughput import Throughput
from hyperpod_ft.runs.run import Run
from tests.tasks import task_without_model


def test_what_begins_is_announced(make_run: Callable[..., Run], capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(
        cluster__nodes=2, parallelism={"ranks_per_node": 2, "tensor_parallel": 2}, training__precision="fp32"
    )
    task, work = task_without_model(run), Throughput(8, 512, None, None, 0.0)
    MetricsLog(task, work, 100, 30, TrainingProgress(), lambda: 0.0).announce("1,000 of 5,000", "replicated, cpu")
    MetricsLog(task, work, 100, 30, TrainingProgress(12), lambda: 0.0).announce("1,000", "neuron")
    first, second, resumed = capsys.readouterr().out.splitlines()
    degrees = "4 ranks (dp 2 x tp 2"
    assert first == (
        f"train: lora of 1,000 of 5,000 parameters in fp32 on {degrees}, replicated, cpu);"
        " 30 steps of 8 rows x 512 tokens, 100 rows"
    )
    assert second.startswith(f"train: lora of 1,000 parameters in fp32 on {degrees}, neuron); ")
    assert resumed == "train: resuming from step 12"


def test_a_row_says_when_it_was_written(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.paths.directory.mkdir(parents=True)
    work = Throughput(8, 512, None, None, 0.0)
    log = MetricsLog(task_without_model(run), work, 100, 30, TrainingProgress(), lambda: 0.0)
    before = time.time()
    log.write(log.advance(TrainingProgress(), 2.5), 1e-3, 1.0)
    row = json.loads(run.paths.metrics_path.read_text())
    assert before - 0.001 <= row["time"] <= time.time() + 0.001
    assert row["loss"] == 2.5


def test_a_step_that_ended_with_the_one_before_has_the_rate_of_both(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that is done with what was launched, the last step would take no time."""
    run, now = make_run(), 100.0
    run.paths.directory.mkdir(parents=True)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    log = MetricsLog(
        task_without_model(run), Throughput(8, 512, None, None, 0.0), 100, 30, TrainingProgress(), lambda: 0.0
    )
    progress = TrainingProgress()
    for seconds, nothing_launched in ((2.0, False), (3.0, False), (0.0, True)):
        now += seconds
        progress = log.advance(progress, 2.5)
        log.write(progress, 1e-3, 1.0, nothing_launched=nothing_launched)
    rows = [json.loads(line) for line in run.paths.metrics_path.read_text().splitlines()]
    assert [row["seconds_per_step"] for row in rows] == [2.0, 3.0, 1.5]


def test_utilization_is_of_the_ranks_that_trained(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine steps on four nodes, one on one."""
    task, now, progress = task_without_model(make_run()), 100.0, TrainingProgress()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for steps, peak in ((9, 4e12), (1, 1e12)):
        # an optimizer step has 1e12 operations, and takes 1 s
        log = MetricsLog(task, Throughput(1, 500, None, 2e9, peak), 100, 10, progress, lambda: 0.0)
        for _ in range(steps):
            now += 1.0
            progress = log.advance(progress, 2.5)
    assert log.facts(progress, 1)["mfu"] == 0.2703
