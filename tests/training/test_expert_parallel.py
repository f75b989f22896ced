"""Ranks that divide the experts of a mixture train as ranks that each have all of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, PretrainedConfig

from hyperpod_ft.runs.run import Run
from tests.training.conftest import VOCABULARY, Jobs, MakeRun
from tests.unit.tiny_families import MIXTURES, SIZES

pytestmark = pytest.mark.training

FULL: dict[str, Any] = {"training.method": "full", "training.learning_rate": 1e-3}
ADAPTERS: dict[str, Any] = {"training.method": "lora", "lora.target_modules": ["q_proj", "o_proj"]}
OF_EXPERTS = ADAPTERS | {"lora.target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
RECOMPUTED = {"training.activation_checkpointing": "full", "training.gradient_accumulation_steps": 2}
SELECTIVE = {"training.activation_checkpointing": "selective"}
STEPS = 3


def config_of(model_type: str, **values: Any) -> PretrainedConfig:
    """Of a mixture whose experts are loaded unevenly."""
    sizes = SIZES | MIXTURES[model_type] | {"vocab_size": VOCABULARY, "initializer_range": 0.2}
    return AutoConfig.for_model(model_type, **sizes | values)


def divided(expert_parallel: int, sharding: str, ranks: int = 2, **more: Any) -> dict[str, Any]:
    given = {"ranks_per_node": ranks, "expert_parallel": expert_parallel, "sharding": sharding}
    return {"parallelism": given | more}


def measured(jobs: Jobs, tmp_path: Path, runs: list[Run]) -> list[dict[str, torch.Tensor]]:
    """Losses of all steps, parameters and the gradients of the last, of each run; all have the same ranks."""
    ranks = runs[0].plan.degrees.world_size
    job = jobs.start(ranks, ["layouts_worker", str(STEPS), str(tmp_path), *(str(run.paths.directory) for run in runs)])
    assert job.wait(300) == 0, job.text()
    return [load_file(tmp_path / f"{run.config.name}.safetensors") for run in runs]


def assert_alike(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], name: str) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        # AdamW divides a gradient by its own size, so elements whose gradient is mostly rounding move by rounding
        limit = 1e-3 if key.startswith("parameter") else 1e-5
        off = float((found[key] - value).abs().max() / value.abs().max().clamp_min(1e-30))
        assert off <= limit, f"{name}: {key} is {off:.0e} off"


CASES = {
    "full": ("qwen3_moe", FULL, ["replicated", "zero1", "zero3"]),
    "recomputed": ("qwen3_moe", FULL | RECOMPUTED, ["replicated", "zero2", "zero3"]),
    "selective": ("glm4_moe", FULL | SELECTIVE, ["zero1", "zero3"]),
    "attention": ("qwen2_moe", ADAPTERS, ["replicated", "zero3"]),
    "experts": ("gpt_oss", OF_EXPERTS, ["zero1", "zero3"]),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_whole_experts(
    make_run: MakeRun, jobs: Jobs, tmp_path: Path, case: str
) -> None:
    model_type, settings, shardings = CASES[case]
    model = config_of(model_type)
    runs = [make_run("whole", settings | divided(1, shardings[0]), model=model)]
    runs += [make_run(sharding, settings | divided(2, sharding), model=model) for sharding in shardings]
    whole, *others = measured(jobs, tmp_path, runs)
    for sharding, found in zip(shardings, others, strict=True):
        assert_alike(found, whole, sharding)
