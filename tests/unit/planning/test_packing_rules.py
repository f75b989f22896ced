"""Packed documents: which families keep them apart, seen on tiny random models, and which runs are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.model_fit import check_model_directory
from hyperpod_ft.planning.packing_rules import SEPARATING_FAMILIES, check_packing
from hyperpod_ft.planning.parallelism import degrees_of
from hyperpod_ft.runs.run import Run

MakeRun = Callable[..., Run]

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# shorter than the documents, in one layer where a family has both kinds
WINDOW = {"sliding_window": 4}
BOTH = WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "cohere2": BOTH,
    "exaone4": BOTH,
    "gemma2": BOTH,
    "gemma3_text": BOTH,
    "ministral": BOTH,
    "mistral": WINDOW,
    "mixtral": WINDOW | {"num_local_experts": 4},
    "olmo3": BOTH,
    "phi3": WINDOW,
    "qwen2": WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3_moe": EXPERTS,
    "starcoder2": WINDOW,
}
LENGTHS = (7, 11, 3, 9)


def mixing(family: str, attention: str) -> float:
    """How much packing changes the logits of four documents, relative to their largest."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | OWN_SETTINGS.get(family, {}))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)  # type: ignore[no-untyped-call]
    for parameter in model.eval().parameters():
        if parameter.ndim > 1:  # large enough that attention matters
            torch.nn.init.normal_(parameter, std=0.3)
    documents = [torch.randint(3, SIZES["vocab_size"], (1, length)) for length in LENGTHS]

    def logits(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(
            input_ids=ids, position_ids=positions[None], attention_mask=None, use_cache=False
        ).logits
        return found

    with torch.inference_mode():
        alone = torch.cat([logits(ids, torch.arange(ids.shape[1])) for ids in documents], dim=1)
        packed = logits(torch.cat(documents, dim=1), torch.cat([torch.arange(length) for length in LENGTHS]))
    return float((packed - alone).abs().max() / alone.abs().max())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", sorted(SEPARATING_FAMILIES))
def test_allowed_families_keep_packed_documents_apart(family: str, attention: str) -> None:
    assert mixing(family, attention) < 1e-5


def test_a_family_that_mixes_packed_documents_is_refused(make_run: MakeRun) -> None:
    assert mixing("opt", "sdpa") > 0.1
    with pytest.raises(UserError, match="opt"):
        check_packing(make_run().config, "opt")


@pytest.mark.parametrize("packing", ["bfd", "wrapped"])
def test_a_model_is_refused_when_its_config_is_read(make_run: MakeRun, tmp_path: Path, packing: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gptj"}))
    config = make_run(dataset__packing=packing).config
    with pytest.raises(UserError) as raised:
        check_model_directory(config, degrees_of(config), tmp_path)
    assert all(fact in str(raised.value) for fact in ("model.source", "gptj", "dataset.packing: none"))


def test_without_packing_every_family_may_train(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gptj"}))
    config = make_run(dataset__packing="none").config
    assert check_model_directory(config, degrees_of(config), tmp_path).memory is None
