"""Compiled layers on two ranks: training and validation losses are those without."""

from typing import Any

import pytest
from transformers import AutoConfig

from tests.training.conftest import VOCABULARY, Jobs, MakeRun, metrics, write_rows
from tests.unit.tiny_families import MIXTURES, SIZES

pytestmark = pytest.mark.training


@pytest.mark.parametrize(
    ("parallelism", "method"),
    [
        ({"sharding": "zero3", "context_parallel": 2}, "full"),
        ({"tensor_parallel": 2}, "lora"),
        ({"pipeline_parallel": 2}, "full"),
        ({"sharding": "zero3", "expert_parallel": 2}, "full"),
    ],
    ids=["zero3-cp", "tp", "pp", "zero3-ep"],
)
def test_losses_are_those_without(make_run: MakeRun, jobs: Jobs, parallelism: dict[str, Any], method: str) -> None:
    mixture = AutoConfig.for_model("qwen3_moe", **SIZES | MIXTURES["qwen3_moe"] | {"vocab_size": VOCABULARY})
    recomputed = {"training.activation_checkpointing": "full"}
    divides_experts = "expert_parallel" in parallelism
    runs = [
        make_run(
            f"compiled-{compiled}",
            {
                "parallelism": {"ranks_per_node": 2} | parallelism,
                "training.method": method,
                "training.compile": compiled,
                "training.max_steps": 2,
                "training.validate_every_steps": 1,
                "training.gradient_accumulation_steps": 2,
            }
            | (recomputed if divides_experts else {}),
            model=mixture if divides_experts else None,
        )
        for compiled in (False, True)
    ]
    for run in runs:
        write_rows(run.paths.dataset_path / "validation", rows=5, max_length=32, seed=9)
    job = jobs.start(2, ["compiled_worker", *(str(run.paths.directory) for run in runs)])
    assert job.wait(300) == 0, job.text()
    expected, found = (metrics(run) for run in runs)
    for key in ("loss", "grad_norm", "validation_loss"):
        assert [row[key] for row in found] == pytest.approx([row[key] for row in expected], rel=0, abs=1e-5)
    assert len(found) == 2 and all(row["validation_loss"] for row in found)
