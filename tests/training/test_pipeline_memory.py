"""What the ranks of a pipeline hold at the peak of a step is what planning estimates, for each schedule."""

import json
from pathlib import Path
from typing import Any

import pipeline_memory_worker
import pytest

from hyperpod_ft.planning.layout import Sharding
from hyperpod_ft.planning.model_shape import model_shape
from hyperpod_ft.planning.torch.step_memory import memory_of
from tests.training.conftest import Jobs, MakeRun, tiny_llama

pytestmark = pytest.mark.training

LENGTH = 128
FULL: dict[str, Any] = {"training.method": "full"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "1f1b": ("1f1b", FULL),
    "interleaved": ("interleaved", FULL),
    "gpipe": ("gpipe", FULL),
    "lora": ("1f1b", {"training.precision": "bf16"}),
}


def test_memory_is_as_estimated(make_run: MakeRun, jobs: Jobs, tmp_path: Path) -> None:
    # activations are most of what a rank holds
    model = tiny_llama(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=12,
        max_position_embeddings=LENGTH,
    )
    shape = model_shape(model.to_dict())
    assert shape is not None
    runs = [
        make_run(
            name,
            {
                "parallelism": {"ranks_per_node": 2, "pipeline_parallel": 2, "pipeline_schedule": schedule},
                "training.micro_batch_size": 2,
                "training.gradient_accumulation_steps": 4,
                "training.max_steps": pipeline_memory_worker.STEPS,
            }
            | changes,
            model=model,
            rows=8,
            max_length=LENGTH,
        )
        for name, (schedule, changes) in CASES.items()
    ]
    out = tmp_path / "peaks.json"
    job = jobs.start(2, ["pipeline_memory_worker", str(out), *(str(run.paths.directory) for run in runs)])
    assert job.wait() == 0, job.text()
    peaks = json.loads(out.read_text())
    ratios: dict[tuple[str, int], float] = {}
    for run in runs:
        name = run.config.name
        counted = memory_of(run.config, run.plan.degrees, shape)
        for rank, stage in enumerate(counted.stages):
            expected = counted.on_rank(stage, Sharding("replicated", 1)).total
            found = peaks[name][rank]
            print(f"{name}, rank {rank}: {found / 1e6:.1f} MB, {found / expected:.3f} of the estimate")
            ratios[name, rank] = found / expected
    assert {place: ratio for place, ratio in ratios.items() if not 0.9 < ratio < 1.1} == {}
