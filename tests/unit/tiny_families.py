"""The sizes of a tiny model of any family, as arguments of transformers' `AutoConfig.for_model`, and GPT-2's files."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FILE = "model.safetensors"
# heads of queries share those of keys and values in pairs
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
# types whose weights are all in linear layers, embeddings and norms, by the names of Llama
DENSE = (
    *("llama", "mistral", "granite", "qwen2", "qwen3", "smollm3"),
    *("gemma2", "gemma3_text", "olmo2", "phi3"),
)
# what a type of mixtures of experts needs besides
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DEEPSEEK = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
_LATENT |= {"head_dim": 4, "num_key_value_heads": 4}
MIXTURES = {
    "mixtral": _EXPERTS | {"num_local_experts": 4},
    "granitemoe": {"num_experts_per_tok": 2, "num_local_experts": 4},
    "olmoe": _EXPERTS | {"num_experts": 4},
    "qwen2_moe": _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_moe": _EXPERTS | {"num_experts": 4},
    "qwen3_next": _EXPERTS
    | {"num_experts": 4, "shared_expert_intermediate_size": 16}
    | {"layer_types": ["linear_attention", "full_attention"]},
    "glm4_moe": _EXPERTS | _DEEPSEEK,
    "deepseek_v3": _EXPERTS | _DEEPSEEK | _LATENT,
    "gpt_oss": {"num_experts_per_tok": 2, "num_local_experts": 4},
    "ernie4_5_moe": _EXPERTS | {"moe_num_experts": 4, "moe_k": 2},
}
# whose attention the engine does not compute, or not all that mixes tokens
ONE_A_ROW = ("gpt_neo", "gpt_oss", "qwen3_next")


def as_published(gpt2: Path) -> None:
    """Rewrite the file of a GPT-2 as it is on the Hub: without the prefix of names, and with the masks of attention."""
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(gpt2 / FILE).items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64) for layer in range(2)}
    save_file(tensors | masks, gpt2 / FILE, {"format": "pt"})
