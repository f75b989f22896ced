"""AdamW's moments as they are stored: how exact they are, how large, and that the same comes back."""

import pytest
import torch

from hyperpod_ft.engines.torch.optimizer.moments import BLOCK, Moments, moments


def stored_bytes(stored: Moments) -> int:
    return sum(tensor.nbytes for tensor in stored.tensors().values())


@pytest.mark.parametrize(("kind", "bytes_each"), [("fp32", 8), ("bf16", 4), ("int8", 2 + 8 / BLOCK)])
def test_size(kind: str, bytes_each: float) -> None:
    like = torch.zeros(16, 4 * BLOCK)
    assert stored_bytes(moments(kind, "w", like)) == like.numel() * bytes_each


@pytest.mark.parametrize(("kind", "error"), [("fp32", 0), ("bf16", 2**-7), ("int8", 0.02)])
def test_moments_come_back(kind: str, error: float) -> None:
    """Within the rounding of the kind, relative to the largest of a block; the last block is short."""
    torch.manual_seed(0)
    first = torch.randn(8, 300) * torch.logspace(-6, 0, 8)[:, None]
    second = torch.randn(8, 300).square() * torch.logspace(-12, 0, 8)[:, None]
    stored = moments(kind, "w", torch.zeros(8, 300))
    one, other = stored.load()
    one.copy_(first), other.copy_(second)
    stored.store(one, other, 1)
    for found, expected in zip(stored.load(), (first, second), strict=True):
        assert ((found - expected).abs() <= 2 * error * expected.abs().amax(1, keepdim=True)).all()
    assert (stored.load()[1] >= 0).all()


def test_int8_keeps_zero_and_the_largest_of_a_block() -> None:
    first = torch.zeros(1, BLOCK)
    first[0, 3] = -5.0
    stored = moments("int8", "w", torch.zeros_like(first))
    stored.store(first, first.square(), 1)
    one, other = stored.load()
    assert torch.equal(one[0, :3], torch.zeros(3)) and other[0, 3] == 25.0
    assert one[0, 3] == pytest.approx(-5.0, rel=0.01), "signed values end just above -1"


def test_vectors_stay_fp32_in_int8() -> None:
    assert set(moments("int8", "norm", torch.zeros(64)).tensors()) == {"exp_avg", "exp_avg_sq"}


def test_bf16_keeps_changes_smaller_than_its_steps() -> None:
    """0.1 % a step decays to 1/e in 1000 steps, on average; rounded to nearest it would not move at all."""
    stored = moments("bf16", "w", torch.zeros(4096, 1))
    stored.store(torch.zeros(4096, 1), torch.ones(4096, 1), 0)
    for step in range(1, 1001):
        first, second = stored.load()
        stored.store(first, second * 0.999, step)
    assert stored.load()[1].mean().item() == pytest.approx(0.999**1000, rel=0.02)


def test_bf16_rounds_alike_on_every_rank_and_after_a_restart() -> None:
    second = torch.rand(64, 64)
    results = []
    for name, step in (("w", 3), ("w", 3), ("w", 4), ("v", 3)):
        stored = moments("bf16", name, second)
        stored.store(second, second, step)
        results.append(stored.load()[1])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2]) and not torch.equal(results[0], results[3])
