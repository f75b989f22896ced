"""Random language models of several families, and adapters that PEFT has trained on them."""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.unit.rounding import Bound

SIZES = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.1}
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def llama(**options: object) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, **options))


def tied_llama() -> PreTrainedModel:
    return llama(tie_word_embeddings=True)


def llama_with_biases() -> PreTrainedModel:
    return llama(attention_bias=True)


def qwen() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, **HEADS))


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=400, n_positions=64, initializer_range=0.1)
    )


def lora(**options: object) -> LoraConfig:
    return LoraConfig(**({"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]} | options))


def base_in(directory: Path, dtype: torch.dtype = torch.float32, *, tokens: int | None = None) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    if tokens:
        model.resize_token_embeddings(tokens, mean_resizing=False)
    return model


def save_base(directory: Path, make: Callable[[], PreTrainedModel], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = make()
    for name, parameter in model.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.to(dtype).save_pretrained(directory)


def trained(model: PreTrainedModel, config: LoraConfig, seed: int = 1) -> PeftModel:
    """An adapter all of whose parameters have moved."""
    live = get_peft_model(model, copy.deepcopy(config))
    torch.manual_seed(seed)
    for name, parameter in live.named_parameters():
        if parameter.requires_grad:
            if "magnitude" in name:
                parameter.data.mul_(1 + 0.1 * torch.rand_like(parameter))
            else:
                parameter.data.add_(torch.randn_like(parameter) * 0.05)
    return live.eval()


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


def same(value: torch.Tensor, expected: torch.Tensor, bound: Bound | None) -> bool:
    return bound.same(value, expected) if bound else torch.equal(value, expected)
