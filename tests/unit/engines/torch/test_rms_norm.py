"""RMSNorms as one function: the same results and gradients, less kept; norms of another form are left alone."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from hyperpod_ft.engines.torch.model import rms_norm
from tests.unit.engines.torch.test_gated_mlp import run

WIDTH = 32


def norm_of(kind: type[nn.Module], dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    norm = kind(WIDTH).to(dtype)
    nn.init.normal_(norm.weight)
    return norm


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_same_results_with_less_kept(kind: type[nn.Module], dtype: torch.dtype, limit: float) -> None:
    norm = norm_of(kind, dtype)
    x = torch.randn(3, 5, WIDTH, dtype=dtype)
    output, gradients, kept = run(norm, x)
    rms_norm.keep_less(norm)
    found, found_gradients, found_kept = run(norm, x)
    assert found.dtype == dtype
    torch.testing.assert_close(found, output, rtol=limit, atol=limit)
    for one, other in zip(found_gradients, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=limit, atol=limit * other.abs().max().item())
    assert found_kept == 3 * 5 * (WIDTH * dtype.itemsize + 4) < kept


def test_gradients_are_exact() -> None:
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm._RmsNorm.apply(x, weight, 1e-6), (x, weight))


@pytest.mark.parametrize("kind", [GemmaRMSNorm, BambaRMSNormGated, nn.LayerNorm, partial(nn.Linear, WIDTH)])
def test_another_form_is_left_alone(kind: Callable[[int], nn.Module]) -> None:
    norm = kind(WIDTH)
    rms_norm.keep_less(norm)
    assert "forward" not in vars(norm)
