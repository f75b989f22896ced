"""Where numpy's BLAS sums as torch's does: there a merge has PEFT's bits, elsewhere its values within rounding."""

import pytest
import torch
from threadpoolctl import threadpool_info

_KERNELS = {info.get("architecture") for info in threadpool_info() if info["internal_api"] == "openblas"}
# OpenBLAS's kernels for AVX-512 sum in one chain, as MKL does; those for older processors do not.
SUMS_AS_TORCH = bool(_KERNELS & {"SkylakeX", "Cooperlake", "SapphireRapids"})

needed = pytest.mark.skipif(not SUMS_AS_TORCH, reason=f"numpy's BLAS does not sum as torch's does here ({_KERNELS})")


def same(value: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit; without the right BLAS as far as one rounding of sums in another order goes."""
    if SUMS_AS_TORCH or value.shape != expected.shape or value.dtype != expected.dtype:
        return torch.equal(value, expected)
    eps = torch.finfo(value.dtype).eps
    return torch.allclose(value.double(), expected.double(), rtol=eps, atol=2e-7)
