"""Tensor-parallel ranks drop out what one rank does: of whole tensors the same, of divided ones each its own part."""

from typing import Any

import pytest
from transformers import GPT2Config, Phi3Config, PretrainedConfig

from tests.training.conftest import Jobs, MakeRun, curve, tiny_llama, train_here

pytestmark = pytest.mark.training

LORA: dict[str, Any] = {
    "lora": {"r": 4, "alpha": 8, "dropout": 0.4, "target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"]},
    "training.learning_rate": 0.05,
}
FULL: dict[str, Any] = {"training.method": "full"}
SIZES = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CASES: dict[str, tuple[PretrainedConfig, dict[str, Any]]] = {
    "lora": (tiny_llama(), LORA),
    "recomputed": (tiny_llama(), LORA | {"training.activation_checkpointing": "full"}),
    "gpt2": (
        GPT2Config(
            n_embd=64,
            n_head=8,
            n_layer=2,
            n_inner=96,
            n_positions=64,
            resid_pdrop=0.4,
            embd_pdrop=0.3,
            attn_pdrop=0.0,
            **SIZES,
        ),
        FULL,
    ),
    "phi3": (
        Phi3Config(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8, resid_pdrop=0.4, **SIZES
        ),
        FULL,
    ),
}


def test_two_ranks_draw_the_masks_of_one(make_run: MakeRun, jobs: Jobs) -> None:
    pairs = []
    for name, (model, settings) in CASES.items():
        one = make_run(f"{name}-one", settings | {"parallelism": {"ranks_per_node": 1}}, model=model)
        train_here(one)
        for sequence_parallel in (False, True):
            divided = {"ranks_per_node": 2, "tensor_parallel": 2, "sequence_parallel": sequence_parallel}
            two = make_run(f"{name}-{sequence_parallel}", settings | {"parallelism": divided}, model=model)
            pairs.append((one, two))
    job = jobs.start(2, ["compiled_worker", *(str(two.paths.directory) for _, two in pairs)])
    assert job.wait() == 0, job.text()
    for one, two in pairs:
        for found, expected in zip(curve(two), curve(one), strict=True):
            assert found == pytest.approx(expected, rel=1e-5), two.config.name
