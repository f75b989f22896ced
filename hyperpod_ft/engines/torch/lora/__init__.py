"""LoRA adapters, and what they are computed with."""
