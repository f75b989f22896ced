"""What the published config.json of these models say of their size, for tests that must not download them."""

from typing import Any

LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
LLAMA_3_70B = LLAMA_3_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
QWEN3_8B = LLAMA_3_8B | {
    "model_type": "qwen3",
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "head_dim": 128,
    "vocab_size": 151936,
}
