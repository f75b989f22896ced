"""Tiny mixtures of experts, and ways in which programs lost what was trained of them."""

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.unit.tiny_families import MIXTURES, SIZES

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def mixture(kind: str) -> PreTrainedModel:
    config = AutoConfig.for_model(kind, **(SIZES | MIXTURES[kind]), initializer_range=0.1)
    return AutoModelForCausalLM.from_config(config)
