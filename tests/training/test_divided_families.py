"""Each family under tensor parallelism computes what one process computes with plain transformers and PEFT."""

from pathlib import Path
from typing import Any

import pytest
from test_layouts import compare, settings
from transformers import AutoConfig, PretrainedConfig

from hyperpod_ft.planning.families import FAMILIES
from tests.training.conftest import VOCABULARY, Jobs, MakeRun

pytestmark = pytest.mark.training

FULL = {"training.method": "full"}
# more tensor-parallel ranks than key/value heads in TP4; a vocabulary that neither degree divides
SIZES = {
    "vocab_size": VOCABULARY + 3,
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
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
GPT = {"num_key_value_heads": None, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
OWN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4},
    "qwen3": {"tie_word_embeddings": True},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.5, "residual_multiplier": 0.5, "attention_bias": True},
    "gemma2": WINDOWS | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": WINDOWS,
    # a fused linear holds no copies of heads
    "phi3": {"num_key_value_heads": 4},
    "gpt_neox": {"num_key_value_heads": None, "attention_dropout": 0.0, "hidden_dropout": 0.0},
    "gpt2": GPT,
    "gptj": GPT | {"rotary_dim": 4},
}
TYPES = [model_type for family in FAMILIES for model_type in family.model_types]
TP2, TP4 = (2, 2, 2, 2), (1, 4, 4, 2)


def config_of(model_type: str) -> PretrainedConfig:
    config: PretrainedConfig = AutoConfig.for_model(model_type, **SIZES | OWN.get(model_type, {}))
    return config


def test_loss_and_every_gradient_agree(make_run: MakeRun, jobs: Jobs, tmp_path: Path) -> None:
    """Full training of each family, in turn without sequence parallelism and with whole or sharded weights."""
    runs = []
    for index, model_type in enumerate(TYPES):
        layout = TP2 if index % 3 == 1 else TP4
        changes = settings(layout, **FULL)
        changes["parallelism"]["sequence_parallel"] = index % 4 != 2
        changes["parallelism"]["sharding"] = "zero3" if layout == TP2 and index % 2 else "auto"
        runs.append(make_run(model_type, changes, model=config_of(model_type)))
    compare(jobs, tmp_path, runs, 0, {"loss": 1e-5, "gradient": 1e-5}, runs)
