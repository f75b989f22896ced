"""NF4, the 4-bit format of QLoRA (Dettmers et al., arXiv:2305.14314, section 3), in plain torch.

A weight is cut into blocks of 64 consecutive values. Each block is divided by its largest absolute value, which is
kept in fp32, and each quotient is replaced by the nearest of 16 levels, the normalized quantiles of a standard normal
distribution. Two 4-bit codes share a byte, the first in its upper half: 4.5 bits a value.
"""

import functools

import torch

BLOCK = 64
# Values that are decoded at once: what is looked up, in fp32, then needs little memory, and fits into the caches.
_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 22}
# the paper's appendix E
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def empty(values: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialized codes, uint8, and scales, fp32, for that many values."""
    blocks = -(-values // BLOCK)
    codes = torch.empty(blocks * BLOCK // 2, dtype=torch.uint8, device=device)
    return codes, torch.empty(blocks, dtype=torch.float32, device=device)


@torch.no_grad()
def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, uint8 [blocks * 32], and scales, fp32 [blocks], of a weight of any shape and floating dtype."""
    flat = weight.detach().flatten().float()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    levels = torch.tensor(LEVELS, device=weight.device)
    # a block of zeros has scale 0
    normalized = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    codes = torch.bucketize(normalized, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8).view(-1, 2)
    return codes[:, 0] << 4 | codes[:, 1], scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """The weight that `quantize` encoded, rounded once to `dtype`."""
    weight: torch.Tensor = _dequantize(codes, scales, *shape, dtype)
    return weight


def decode(codes: torch.Tensor, scales: torch.Tensor, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """What `dequantize` returns; of its size, nothing but the result is made."""
    at_once = _AT_ONCE[codes.device.type]
    decoded = torch.empty(len(scales), BLOCK, dtype=dtype, device=codes.device)
    pairs = _pairs(codes.device)
    parts = (codes.split(at_once // 2), scales.split(at_once // BLOCK), decoded.split(at_once // BLOCK))
    for some, scale, part in zip(*parts, strict=True):
        # one look-up gives both values of a byte
        values = pairs.index_select(0, some.int()).view(-1, BLOCK)
        torch.mul(values, scale[:, None], out=part)
    return decoded.flatten()[: rows * columns].view(rows, columns)


# one operation, so that tracing, which has no values, never fills the table
_dequantize = torch.library.custom_op("hyperpod_ft::nf4_dequantize", decode, mutates_args=())
_dequantize.register_fake(lambda codes, scales, rows, columns, dtype: codes.new_empty(rows, columns, dtype=dtype))


@functools.cache
def _pairs(device: torch.device) -> torch.Tensor:
    """Both values of each byte, [256, 2]. Kept: an accelerator waits for a copy from the host."""
    levels = torch.tensor(LEVELS, device=device)
    return torch.stack((levels.repeat_interleave(16), levels.repeat(16)), 1)
