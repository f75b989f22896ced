"""What vLLM accepts, whether the kit or an endpoint's container starts it. Pure."""

_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of --max-lora-rank
MAX_LORA_RANK = _LORA_RANKS[-1]


def max_lora_rank(rank: int) -> int:
    """The smallest --max-lora-rank for adapters of a rank, which is at most MAX_LORA_RANK."""
    return next(accepted for accepted in _LORA_RANKS if accepted >= rank)
