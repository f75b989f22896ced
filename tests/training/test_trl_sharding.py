"""Engine trl with FSDP2 on two ranks: every objective that keeps a second model, scores or samples answers."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hyperpod_ft.planning.trl import rules
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import consolidate
from tests.training import test_grpo, test_kto, test_reward_model
from tests.training.conftest import Jobs, curve, metrics, tiny_llama
from tests.unit import tiny_tokenizer

pytestmark = pytest.mark.training
# A third of the tokens end an answer: the ranks sample together until the last of all answers ends.
BRIEF = {"generation_kwargs": {"suppress_tokens": [0, *range(2, 310)]}}
MODES = {"dpo": "zero2", "kto": "zero3", "reward": "zero2", "grpo": "zero3", "rloo": "zero2", "distillation": "zero3"}


def prepared(objective: str, directory: Path) -> Run:
    """Two steps of two ranks, each step with a checkpoint; adapters for grpo, else all parameters."""
    directory.mkdir()
    training: dict[str, Any] = {"objective": objective, "method": "lora" if objective == "grpo" else "full"}
    training |= {"max_steps": 2, "save_every_steps": 1, "learning_rate": 1e-3, "gradient_accumulation_steps": 1}
    settings: dict[str, Any] = {"training": training, "parallelism": {"ranks_per_node": 2}}
    if objective in ("dpo", "kto", "reward"):
        training["validate_every_steps"] = 1
        rows = test_kto.ROWS if objective == "kto" else test_reward_model.PAIRS
        return test_kto.prepared(
            directory, [rows], settings | {"dataset": {"validation_share": 0.25, "packing": "none"}}
        )
    settings |= {"reward": [{"function": "rewards.py:long"}], "lora": {"r": 4, "dropout": 0.0}, "trl": BRIEF}
    if objective == "distillation":
        tokenizer = tiny_tokenizer.make()
        torch.manual_seed(8)
        teacher = AutoModelForCausalLM.from_config(tiny_llama(vocab_size=len(tokenizer), initializer_range=0.3))
        teacher.save_pretrained(directory / "teacher")
        tokenizer.save_pretrained(directory / "teacher")
        settings |= {"reward": [], "sampling": {"generations": 8, "beta": 0.0}}
        settings |= {"teacher": {"source": str(directory / "teacher")}}
    return test_grpo.prepared(directory, test_grpo.TEXTS, settings)


def found(run: Run) -> list[float]:
    """What the curve has of each step, and the validation losses."""
    validation = [row["validation_loss"] for row in metrics(run) if row["validation_loss"]]
    return [*(value for _, *values in curve(run) for value in values), *validation]


def tuned(run: Run) -> dict[str, torch.Tensor]:
    """What is consolidated."""
    consolidate.work(run)
    lora = run.config.training.method == "lora"
    name = "adapter_model" if lora else "model"
    return load_file((run.paths.adapter if lora else run.paths.tuned_model) / f"{name}.safetensors")


def test_sharded_ranks_train_save_and_resume_as_replicas(trl_jobs: Jobs, tmp_path: Path) -> None:
    runs = {objective: prepared(objective, tmp_path / objective) for objective in MODES}
    trl_jobs.environment |= rules.variables(runs["kto"].config, tmp_path)

    def train(modes: dict[str, str]) -> None:
        given = [word for objective, mode in modes.items() for word in (mode, str(runs[objective].paths.directory))]
        job = trl_jobs.start(2, ["trl_sharding_worker", *given])
        assert job.wait() == 0, job.text()

    train(dict.fromkeys(MODES, "replicated"))
    replicas = {objective: (found(run), tuned(run)) for objective, run in runs.items()}
    for run in runs.values():
        shutil.rmtree(run.paths.checkpoints)
        run.paths.metrics_path.unlink()
    train(MODES)
    sharded = {objective: (found(run), tuned(run)) for objective, run in runs.items()}
    for objective, (measured, model) in sharded.items():
        assert measured == pytest.approx(replicas[objective][0], rel=1e-4, abs=1e-6), objective
        assert model.keys() == replicas[objective][1].keys()
        for name, tensor in model.items():
            assert float((tensor - replicas[objective][1][name]).abs().max()) < 1e-3, name
        (runs[objective].paths.checkpoint(2) / "checkpoint.json").unlink()
    train(MODES)
    assert {objective: found(run) for objective, run in runs.items()} == {
        objective: measured for objective, (measured, _) in sharded.items()
    }
