"""Families whose packed documents train as they do alone, each with what shapes its attention and its logits."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.models import write_config
from hyperpod_ft.engines.certificate.alone import alone
from hyperpod_ft.engines.certificate.model import save_small
from hyperpod_ft.engines.torch.certificate.packing import why_not_packed

pytestmark = pytest.mark.training

WINDOW: dict[str, Any] = {"sliding_window": 64}
BOTH: dict[str, Any] = WINDOW | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
QWEN = WINDOW | {"use_sliding_window": True, "max_window_layers": 1}
PLAIN = """
    apertus arcee axk1 bitnet ctrl deepseek_v3 diffllama ernie4_5 flex_olmo gemma glm glm4 glm4_moe gpt2 gpt_bigcode
    gpt_neox gptj granitemoe granitemoeshared helium hunyuan_v1_dense llama longcat_flash minimax_m2 nanochat nemotron
    olmo olmo2 olmoe persimmon phi qwen3_moe seed_oss smollm3 stablelm
    """.split()  # noqa: SIM905 - a list would have a line for each
SETTINGS: dict[str, dict[str, Any]] = {
    **{family: {} for family in PLAIN},
    "cohere": {"logit_scale": 0.5},
    "cohere2": BOTH | {"logit_scale": 0.5},
    "cwm": BOTH,
    "exaone4": BOTH,
    "gemma2": BOTH | CAPS,
    "gemma3_text": BOTH | {"final_logit_softcapping": 3.0},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.5},
    "ministral": BOTH,
    "ministral3": WINDOW,
    "mistral": WINDOW,
    "mixtral": WINDOW,
    "olmo3": BOTH,
    "phi3": WINDOW,
    "qwen2": QWEN,
    "qwen3": QWEN,
    "starcoder2": WINDOW,
    "vaultgemma": BOTH | CAPS,
}


def save_family(family: str, directory: Path) -> Path:
    """A small model, in a directory with the family's name."""
    save_small(write_config(family, directory / f"{family}-config", **SETTINGS[family]), directory / family)
    return directory / family


@pytest.mark.parametrize("family", SETTINGS)
def test_packed_documents_train_as_they_do_alone(tmp_path: Path, family: str) -> None:
    directory = save_family(family, tmp_path)
    assert not why_not_packed(directory, alone(directory))
