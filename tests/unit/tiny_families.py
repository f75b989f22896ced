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


def as_published(gpt2: Path) -> None:
    """Rewrite the file of a GPT-2 as it is on the Hub: without the prefix of names, and with the masks of attention."""
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(gpt2 / FILE).items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64) for layer in range(2)}
    save_file(tensors | masks, gpt2 / FILE, {"format": "pt"})
