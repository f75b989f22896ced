"""The parameters of mixtures by config.json, compared with those of transformers' classes."""

import json
import re
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from hyperpod_ft.planning.undivided.mixture import mixture_shape
from hyperpod_ft.planning.undivided.shape import UndividedShape
from tests.unit.published_mixtures import PUBLISHED
from tests.unit.tiny_families import MIXTURES, SIZES

VARIANTS = [
    *((model_type, {}) for model_type in MIXTURES),
    *((model_type, {"tie_word_embeddings": True}) for model_type in ("mixtral", "ernie4_5_moe")),
    *((model_type, {"attention_bias": True}) for model_type in ("qwen3_moe", "olmoe", "granitemoe", "deepseek_v3")),
    ("glm4_moe", {"use_qk_norm": True, "attention_bias": True}),
    ("gpt_oss", {"attention_bias": False}),
    ("qwen2_moe", {"qkv_bias": False, "shared_expert_intermediate_size": 24}),
    ("qwen3_moe", {"num_hidden_layers": 6, "mlp_only_layers": [1], "decoder_sparse_step": 2}),
    ("deepseek_v3", {"q_lora_rank": None, "n_shared_experts": 2, "first_k_dense_replace": 0}),
]


def described(config: PretrainedConfig) -> dict[str, Any]:
    """What config.json says, as transformers writes it."""
    values: dict[str, Any] = json.loads(config.to_json_string())
    return values


def empty_model(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model


def shape_of(values: dict[str, Any]) -> UndividedShape:
    shape = mixture_shape(values)
    assert shape is not None
    return shape


@pytest.mark.parametrize(("model_type", "changes"), VARIANTS, ids=str)
def test_parameters_have_their_names_and_shapes(model_type: str, changes: dict[str, Any]) -> None:
    config = AutoConfig.for_model(model_type, **SIZES | MIXTURES[model_type] | changes)
    own: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for name, parameter in empty_model(config).named_parameters():
        own[re.sub(r"\.\d+\.", ".*.", name), tuple(parameter.shape)] += 1
    assert {(each.name, each.shape): each.count for each in shape_of(described(config)).inventory} == own


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_sizes(name: str) -> None:
    values, billions, active = PUBLISHED[name]
    config = AutoConfig.for_model(**values)
    shape = shape_of(values)
    assert shape.parameters == sum(parameter.numel() for parameter in empty_model(config).parameters())
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.02)
    lookup = 0 if shape.tied else shape.vocabulary * shape.hidden
    without_lookup = (shape.active_parameters - lookup) / 1e9
    assert min(abs(without_lookup / active - 1), abs(shape.active_parameters / 1e9 / active - 1)) < 0.12


def test_what_is_no_usual_mixture_has_no_shape() -> None:
    assert mixture_shape({"model_type": "jamba", "hidden_size": 8}) is None
    assert mixture_shape({"model_type": "mixtral", "hidden_size": 8}) is None
