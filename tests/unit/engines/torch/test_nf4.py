"""NF4 has the levels of the QLoRA paper, and rounds to the nearest of them."""

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hyperpod_ft.engines.torch.lora import nf4
from hyperpod_ft.planning.torch.sharded_state import NF4_BYTES

LEVELS = torch.tensor(nf4.LEVELS)


def test_levels_are_quantiles_of_a_normal_distribution() -> None:
    """Eight negative and nine positive quantiles that share 0, divided by the largest (QLoRA, section 3)."""
    # the largest quantile: the mean of 1 - 1/30 and 1 - 1/32
    largest = 1 - (1 / 30 + 1 / 32) / 2
    quantiles = torch.special.ndtri(torch.linspace(largest, 0.5, 9, dtype=torch.float64))
    negative = -torch.special.ndtri(torch.linspace(largest, 0.5, 8, dtype=torch.float64))
    expected = torch.cat((quantiles[:-1], negative)).sort().values
    torch.testing.assert_close(LEVELS.double(), expected / expected.max(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(4, 64), (3, 50), (1, 1)])
def test_every_value_becomes_the_nearest_level(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape)
    codes, scales = nf4.quantize(weight)
    assert codes.dtype == torch.uint8 and codes.numel() * 2 == scales.numel() * nf4.BLOCK
    decoded = nf4.dequantize(codes, scales, shape, torch.float32)
    flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % nf4.BLOCK)).view(-1, nf4.BLOCK)
    levels = LEVELS * flat.abs().amax(1)[:, None]
    nearest = (flat[:, :, None] - levels[:, None, :]).abs().amin(2).flatten()[: weight.numel()]
    torch.testing.assert_close((decoded - weight).abs().flatten(), nearest, rtol=0, atol=1e-6)


def test_what_is_decoded_encodes_to_itself() -> None:
    torch.manual_seed(0)
    codes, scales = nf4.quantize(torch.randn(8, 128).bfloat16())
    again = nf4.quantize(nf4.dequantize(codes, scales, (8, 128), torch.float32))
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)


def test_zeros_stay_zeros() -> None:
    codes, scales = nf4.quantize(torch.zeros(2, 64))
    assert torch.equal(nf4.dequantize(codes, scales, (2, 64), torch.bfloat16), torch.zeros(2, 64).bfloat16())


def test_error_and_size_on_normal_values() -> None:
    torch.manual_seed(0)
    weight = torch.randn(512, 512)
    codes, scales = nf4.quantize(weight)
    assert codes.nbytes + scales.nbytes == weight.numel() * NF4_BYTES
    error = nf4.dequantize(codes, scales, (512, 512), torch.float32) - weight
    # 16 levels for values up to about 2.4 standard deviations
    assert 0.08 < error.square().mean().sqrt() < 0.10
    gaps = (LEVELS[1:] - LEVELS[:-1]).max() / 2
    assert bool((error.view(-1, nf4.BLOCK).abs().amax(1) <= gaps * scales * (1 + 1e-6)).all())


def test_empty_has_the_sizes_of_quantize() -> None:
    for values in (1, 64, 65):
        expected, found = nf4.quantize(torch.ones(values)), nf4.empty(values, torch.device("cpu"))
        assert [part.shape for part in found] == [part.shape for part in expected]
        assert math.prod(found[0].shape) * 2 >= values


class Allocated(TorchDispatchMode):
    """Bytes of the largest result of an operation, by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.bytes[result.dtype] = max(self.bytes.get(result.dtype, 0), result.nbytes)
        return result


def test_only_the_weight_itself_is_as_large_as_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is decoded part by part, into the dtype in which it is multiplied, with the bits of one rounding."""
    torch.manual_seed(0)
    shape = (96, 130)  # it ends within a block, and within a part
    codes, scales = nf4.quantize(torch.randn(shape))
    whole = nf4.dequantize(codes, scales, shape, torch.float32)
    monkeypatch.setitem(nf4._AT_ONCE, "cpu", 16 * nf4.BLOCK)
    with Allocated() as allocated:
        decoded = nf4.decode(codes, scales, *shape, torch.bfloat16)
    assert decoded.dtype == torch.bfloat16 and torch.equal(decoded, whole.bfloat16())
    assert torch.equal(nf4.dequantize(codes, scales, shape, torch.float32), whole)
    assert allocated.bytes[torch.float32] == 16 * nf4.BLOCK * 4 < decoded.nbytes
    assert allocated.bytes.keys() <= {torch.bfloat16, torch.float32, torch.int32, torch.uint8}
    assert allocated.bytes[torch.int32] < decoded.nbytes
