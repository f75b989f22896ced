"""Answers sampled by vLLM, beside their training; what its CPU build does not allow is changed by vllm_on_cpus.py."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hyperpod_ft.planning.trl import limits, rules
from hyperpod_ft.runs.run import Run
from tests.forking import ForkServer
from tests.training.conftest import ENVIRONMENT, Jobs, job_server, jobs_in, metrics
from tests.training.test_grpo import TEXTS, killed_then_noticed, prepared
from tests.training.test_packed_families import SETTINGS
from tests.training.test_trl import again_from
from tests.unit import tiny_tokenizer
from tests.unit.tiny_families import SIZES

DIFFERENCE = "sampling/sampling_logp_difference/mean"
TINY_LLAMA = Path(__file__).parents[2] / "examples/quickstart/tiny-llama"
pytestmark = [pytest.mark.training, pytest.mark.vllm]


@pytest.fixture(scope="module")
def vllm_server() -> Iterator[ForkServer]:
    python = os.environ.get("HYPERPOD_FT_VLLM_PYTHON")
    if not python:
        pytest.skip("HYPERPOD_FT_VLLM_PYTHON is not set")
    # compiling kernels would take a minute a rank
    environment = os.environ | ENVIRONMENT | {"TORCH_COMPILE_DISABLE": "1"}
    modules = ["vllm_on_cpus", "hyperpod_ft.engines.trl.loop", "transformers.models.llama.modeling_llama"]
    with contextlib.closing(job_server(modules, environment, python=python)) as server:
        yield server


@pytest.fixture
def vllm_jobs(tmp_path: Path, vllm_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    for name in ("_check_vllm", "_check_vllm_share"):
        monkeypatch.setattr(limits, name, lambda *_: None)
    with jobs_in(tmp_path / "jobs", vllm_server) as result:
        result.environment["TORCH_COMPILE_DISABLE"] = "1"
        yield result


def sampled_run(tmp_path: Path, changes: dict[str, Any]) -> Run:
    """Without dropout, the training's probabilities of its answers are vLLM's, but for bf16."""
    settings: dict[str, Any] = {
        "model": {"source": "example:tiny-llama"},
        "lora": {"dropout": 0},
        "training": {"max_steps": 4, "learning_rate": 1e-2},
        "trl": {"use_vllm": True, "vllm_gpu_memory_utilization": 0.04},
    }
    for section, values in changes.items():
        settings[section] = settings.get(section, {}) | values if isinstance(values, dict) else values
    return prepared(tmp_path, TEXTS, settings)


def test_ranks_end_with_their_vllm_and_a_restart_goes_on(tmp_path: Path, vllm_jobs: Jobs) -> None:
    changes = {"training": {"max_steps": 8, "save_every_steps": 2}, "parallelism": {"ranks_per_node": 2}}
    run = sampled_run(tmp_path, changes)
    vllm_jobs.environment |= rules.variables(run.config, tmp_path)
    processes, _ = killed_then_noticed(vllm_jobs, run)
    vllm_jobs.train(run)
    record = run.journal.record("train")
    assert record is not None and record.facts["resumed_from"] == [2, 6]
    assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]
    found = [row[DIFFERENCE] for row in metrics(run)]
    assert len(found) == 8 and max(found) < 0.02, found


@pytest.mark.parametrize(
    "changes",
    [
        {"training": {"method": "full", "precision": "bf16"}},
        {"lora": {"modules_to_save": ["embed_tokens", "lm_head"]}, "training": {"precision": "bf16"}},
        {"lora": {"dora": True}},
        {"training": {"objective": "rloo"}},
    ],
    ids=["full", "whole modules", "dora", "rloo"],
)
def test_vllm_has_the_weights_of_each_step(tmp_path: Path, vllm_jobs: Jobs, changes: dict[str, Any]) -> None:
    run = sampled_run(tmp_path, changes)
    vllm_jobs.environment |= rules.variables(run.config, tmp_path)
    vllm_jobs.train(run)
    found = [row.get(DIFFERENCE, 0.0) for row in metrics(run)]  # RLOO has none
    assert len(found) == 4 and max(found) < 0.02, found


@pytest.mark.parametrize("family", sorted({*limits._OF_VLLM} - {"llama"}))
def test_vllm_has_the_weights_of_every_type(tmp_path: Path, vllm_jobs: Jobs, family: str) -> None:
    tokenizer, source = tiny_tokenizer.make(), tmp_path / family
    heads = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "max_position_embeddings": 128}
    heads |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 320}  # Qwen2's tokenizer adds one
    heads |= {"use_sliding_window": False, "initializer_range": 0.1}
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | SETTINGS[family] | heads))
    model.save_pretrained(source)
    tokenizer.save_pretrained(source)
    changes = {"model": {"source": str(source)}, "training": {"max_steps": 3}}
    run = sampled_run(tmp_path, changes)
    vllm_jobs.environment |= rules.variables(run.config, tmp_path)
    vllm_jobs.train(run)
    found = [row[DIFFERENCE] for row in metrics(run)]
    assert len(found) == 3 and max(found) < 0.02, found


def test_a_student_answers_with_vllm(tmp_path: Path, vllm_jobs: Jobs) -> None:
    """Of a teacher that is surer of what its student would say.

    A restart samples the same, but its frozen weights have had no adapters added and subtracted.
    """
    teacher = AutoModelForCausalLM.from_pretrained(TINY_LLAMA)
    teacher.lm_head.weight.data *= 3
    teacher.save_pretrained(tmp_path / "teacher")
    shutil.copy(TINY_LLAMA / "tokenizer.json", tmp_path / "teacher")
    changes = {
        "reward": [],
        "sampling": {"generations": 8, "beta": 0.0},
        "teacher": {"source": str(tmp_path / "teacher")},
        "training": {"objective": "distillation", "max_steps": 8, "save_every_steps": 4},
    }
    run = sampled_run(tmp_path, changes)
    vllm_jobs.environment |= rules.variables(run.config, tmp_path)
    vllm_jobs.train(run)
    losses = [row["loss"] for row in metrics(run)]
    assert losses[-1] < 0.5 * losses[0], losses
    again_from(run, 4)
    vllm_jobs.train(run)
    assert [row["loss"] for row in metrics(run)] == pytest.approx(losses, rel=1e-5)
