"""The tokens that models are compared on."""

import torch


def probe(vocabulary: int) -> torch.Tensor:
    """int64 [2, 32]."""
    return torch.randint(3, vocabulary, (2, 32), generator=torch.Generator().manual_seed(7))
