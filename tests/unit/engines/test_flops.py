"""Model FLOPs and rates against numbers worked out by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    GPT2Config,
    PersimmonConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from hyperpod_ft.engines.throughput import Throughput, flops_per_token, known_shape
from hyperpod_ft.planning.model_shape import ModelShape, model_shape

# meta-llama/Meta-Llama-3-8B's config.json
LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
TOTAL = 8_030_261_248
LOOKUP = 128_256 * 4_096
ATTENTION = 12 * 32 * 32 * 128 * 2048  # 3,221,225,472
ADAPTERS = 41_943_040  # r 16 on all seven matrices


def llama(**changes: Any) -> ModelShape:
    shape = model_shape(LLAMA_3_8B | changes)
    assert shape is not None
    return shape


def test_llama_3_8b_trained_whole() -> None:
    assert llama().parameters == TOTAL
    assert flops_per_token(llama(), 2048) == 6 * 7_504_924_672 + ATTENTION == 48_250_773_504


def test_llama_3_8b_with_lora_has_no_gradients_of_frozen_matrices() -> None:
    expected = 4 * 7_504_924_672 + 6 * ADAPTERS + ATTENTION
    assert flops_per_token(llama(), 2048, ADAPTERS) == expected == 33_492_582_400
    assert flops_per_token(llama(), 2048, ADAPTERS, trains_output=True) == expected + 2 * LOOKUP


def test_other_counts_of_the_same_step() -> None:
    """The table in benchmarks/performance.md: rows of 4,096 tokens in documents of 512."""
    matrices, pairs = TOTAL - LOOKUP, 32 * 32 * 128
    counts = (
        flops_per_token(llama(), 4096, ADAPTERS),
        2 / 3 * (6 * matrices + 12 * pairs * 4096 / 2),  # NeMo AutoModel's flops_utils.py, with LoRA
        4 * matrices + 6 * ADAPTERS + 12 * pairs * 512 / 2,
    )
    assert [round(count / 1e9, 1) for count in counts] == [36.7, 32.2, 30.7]
    shares = [[round(100 * rate * count / 989.4e12, 1) for rate in (15_859, 16_871, 12_473)] for count in counts]
    assert shares == [[58.8, 62.6, 46.3], [51.6, 54.9, 40.6], [49.2, 52.3, 38.7]]


def test_a_tied_embedding_is_multiplied_once_as_output() -> None:
    assert flops_per_token(llama(tie_word_embeddings=True), 2048) == 48_250_773_504


def test_learned_positions_are_looked_up() -> None:
    assert flops_per_token(replace(llama(), positions=1024), 2048) == 48_250_773_504


@pytest.mark.parametrize("tied", [False, True])
def test_a_reward_model_has_no_output_matrix(tied: bool) -> None:
    shape = llama(tie_word_embeddings=tied)
    assert flops_per_token(shape, 2048, has_output=False) == 48_250_773_504 - 6 * LOOKUP


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", [PersimmonConfig, Qwen3MoeConfig, GPT2Config])
def test_a_reward_model_in_its_files(tmp_path: Path, family: type[PretrainedConfig], tied: bool) -> None:
    """Of a type that config.json sizes by its row, as a mixture, or that only its files size."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 96, "num_labels": 1}
    experts = {"num_experts": 4, "num_experts_per_tok": 4} if family is Qwen3MoeConfig else {}
    config = family(**sizes, **experts, tie_word_embeddings=tied)
    model: Any = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(tmp_path)
    shape = known_shape(tmp_path)
    assert shape is not None
    embeddings = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    matrices = sum(one.numel() for one in model.parameters()) - sum(one.weight.numel() for one in embeddings)
    attention = 12 * 2 * shape.query_width * 32
    assert flops_per_token(shape, 32, has_output=False) - attention == pytest.approx(
        6 * matrices, abs=6 * 64
    )  # the score


def test_heads_of_a_size_of_their_own() -> None:
    # as Qwen3's; queries and outputs 4096 x 4096 more, keys and values 4096 x 1024
    more = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    assert flops_per_token(llama(head_dim=256), 2048) == 48_250_773_504 + 6 * more + ATTENTION


@pytest.mark.parametrize("changes", [{"num_hidden_layers": None}, {"hidden_size": None}])
def test_what_is_not_known_of_a_family_is_not_made_up(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    assert known_shape(tmp_path) == llama()
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B | changes))
    assert known_shape(tmp_path) is None


def test_rates() -> None:
    # 12 rows of 2048 tokens in 3 s on one trn1.32xlarge, 16 chips of 190 TFLOPS
    throughput = Throughput(12, 2048, 3.5, 33_492_582_400, 16 * 190e12)
    rates = throughput.rates(10, 30.0)
    assert (rates.seconds_per_step, rates.rows_per_second, rates.documents_per_second) == (3.0, 4.0, 14.0)
    assert rates.tokens_per_second == 8192
    # 8,192 * 33.49e9 = 2.744e14 of 3.04e15 operations a second
    assert rates.mfu == 0.0903


def test_no_utilization_of_an_unknown_peak() -> None:
    rates = Throughput(2, 32, None, 1e9, 0.0).rates(1, 1.0)
    assert rates.mfu is None and rates.documents_per_second is None
    assert Throughput(2, 32, None, None, 1e12).rates(1, 1.0).mfu is None
