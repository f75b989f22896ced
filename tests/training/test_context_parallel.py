"""Rows divided over ranks: losses, gradients and weights are those of one process with plain transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from test_layouts import compare, differences
from test_packed_families import SETTINGS, save_family
from test_sharding import FULL, check, expected_of, job
from transformers import Gemma2Config, PretrainedConfig

from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import consolidate
from tests.training.conftest import Jobs, MakeRun, metrics, tiny_llama, train_here, write_rows

pytestmark = pytest.mark.training

ROWS_PER_STEP = 8


def settings(context: int, tensor: int = 1, micro_batch_size: int = 2, **changes: Any) -> dict[str, Any]:
    """Four ranks, and the same rows in a step."""
    rows = 4 // context // tensor * micro_batch_size
    return {
        "parallelism": {"ranks_per_node": 4, "tensor_parallel": tensor, "context_parallel": context},
        "training.micro_batch_size": micro_batch_size,
        "training.gradient_accumulation_steps": ROWS_PER_STEP // rows,
        "training.max_steps": 8,
        "training.learning_rate": 1e-3,
        "training.max_grad_norm": 0.2,
    } | changes


def gemma2() -> PretrainedConfig:
    """Few key/value heads; windows and softly capped scores, in blocks of their own."""
    return Gemma2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=6,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
        max_position_embeddings=128,
    )


def documents_cross_chunks(run: Run) -> bool:
    """Whether documents of the first step's rows begin before a quarter of a row and end after it."""
    positions = np.load(run.paths.dataset_path / "train" / "position_ids.npy")
    quarter = positions.shape[1] // 4
    return all((positions[:, begin] > 0).any() for begin in (quarter, 2 * quarter, 3 * quarter))


def test_loss_and_every_gradient_agree(make_run: MakeRun, jobs: Jobs, tmp_path: Path) -> None:
    one_head = tiny_llama(num_key_value_heads=1, attention_bias=True)
    runs = [
        make_run("with-tp", settings(2, 2)),
        make_run("full-four", settings(4, 1, 4, **FULL), model=tiny_llama(tie_word_embeddings=True)),
        make_run("copied-heads", settings(4, **FULL), model=one_head),
        make_run("gemma2", settings(4, **FULL), model=gemma2()),
    ]
    assert documents_cross_chunks(runs[0])
    compare(jobs, tmp_path, runs, 0, {"loss": 1e-5, "gradient": 1e-5}, runs)


def test_every_sharding_sums_over_the_ranks_of_a_row(make_run: MakeRun, jobs: Jobs, tmp_path: Path) -> None:
    """And restarts have the same bits. test_loss_and_every_gradient_agree has whole weights on each rank."""
    runs = {
        "lora": (make_run("lora", settings(2)), [("zero1", 4, "none")]),
        "full": (make_run("full", settings(4, **FULL)), [("zero2", 2, "none"), ("zero3", 4, "none")]),
        "tp": (make_run("tp", settings(2, 2, **FULL)), [("zero3", 2, "none")]),
    }
    check(job(jobs, tmp_path, 4, runs), {name: expected_of(run) for name, (run, _) in runs.items()})


def exported(run: Run) -> dict[str, torch.Tensor]:
    consolidate.work(run)
    return {name: t for path in run.paths.tuned_model.glob("*.safetensors") for name, t in load_file(path).items()}


def test_validation_losses_and_exported_weights_agree(make_run: MakeRun, jobs: Jobs) -> None:
    validated = {"training.validate_every_steps": 2, "training.max_steps": 4, **FULL}
    one_rank = {"parallelism": {"ranks_per_node": 1}, "training.gradient_accumulation_steps": 4}
    alone = make_run("alone", settings(2, 2) | one_rank | validated)
    divided = make_run("divided", settings(2, 2) | validated)
    for run in (alone, divided):
        write_rows(run.paths.dataset_path / "validation", rows=5, max_length=32, seed=9)
    train_here(alone)
    jobs.train(divided)
    for key in ("loss", "grad_norm", "validation_loss"):
        expected, found = ([row[key] for row in metrics(run) if row[key] is not None] for run in (alone, divided))
        assert len(found) >= 2 and found == pytest.approx(expected, rel=1e-5), key
    # AdamW divides a gradient by its own size, so elements whose gradient is mostly rounding move by rounding
    assert max(differences(exported(divided), exported(alone), "").values()) <= 1e-4
    # dropout: ranks 0 and 2 have other tokens of the same rows
    states = {rank: {"cpu": torch.get_rng_state()} for rank in "02"}
    dcp.load({"random": states}, storage_reader=dcp.FileSystemReader(divided.paths.checkpoint(4)), no_dist=True)
    assert not torch.equal(states["0"]["cpu"], states["2"]["cpu"])


def test_every_family_computes_on_two_ranks_what_it_does_on_one(jobs: Jobs, tmp_path: Path) -> None:
    directories = [save_family(family, tmp_path) for family in SETTINGS]
    job = jobs.start(2, ["families_worker", str(tmp_path / "differences.json"), *map(str, directories)])
    assert job.wait(300) == 0, job.text()
    differences = json.loads((tmp_path / "differences.json").read_text())
    assert differences == dict.fromkeys(SETTINGS, "")
