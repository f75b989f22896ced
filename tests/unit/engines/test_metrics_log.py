"""The first lines of a training's log, the same for every engine."""

from collections.abc import Callable

import pytest

from hyperpod_ft.engines.checkpoint_directory import Progress
from hyperpod_ft.engines.metrics import MetricsLog
from hyperpod_ft.engines.throughput import Throughput
from hyperpod_ft.runs.run import Run


def test_what_begins_is_announced(make_run: Callable[..., Run], capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(
        cluster__nodes=2, parallelism={"ranks_per_node": 2, "tensor_parallel": 2}, training__precision="fp32"
    )
    work = Throughput(8, 512, None, None, 0.0)
    MetricsLog(run, work, 100, 30, Progress(), lambda: 0.0).announce("1,000 of 5,000", "replicated, cpu")
    MetricsLog(run, work, 100, 30, Progress(12), lambda: 0.0).announce("1,000", "neuron")
    first, second, resumed = capsys.readouterr().out.splitlines()
    degrees = "4 ranks (dp 2 x tp 2"
    assert first == (
        f"train: lora of 1,000 of 5,000 parameters in fp32 on {degrees}, replicated, cpu);"
        " 30 steps of 8 rows x 512 tokens, 100 rows"
    )
    assert second.startswith(f"train: lora of 1,000 parameters in fp32 on {degrees}, neuron); ")
    assert resumed == "train: resuming from step 12"
