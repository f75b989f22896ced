"""AdamW's two moments of one shard of a parameter, as they are stored between steps: in fp32, bf16 or int8.

They are computed in fp32; `load` and `store` convert. What is stored is what a checkpoint saves, so a restart
continues with the same bits.
"""

import zlib
from functools import cache

import torch

BLOCK = 256  # elements of a row that share a scale in int8


def moments(kind: str, name: str, like: torch.Tensor) -> "Moments":
    """Zero moments of the parameter `name`, whose shard is `like`; `kind` as in training.optimizer_state.

    Vectors are small and their moments fp32 in any case.
    """
    if kind == "int8" and like.ndim > 1:
        return QuantizedMoments(like)
    return Bf16Moments(name, like) if kind == "bf16" else Moments(like)


class Moments:
    """AdamW's moments of one parameter, as they are stored between steps: in fp32, or as a subclass says."""

    def __init__(self, like: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
        self._first, self._second = (torch.zeros_like(like, dtype=dtype) for _ in range(2))

    def load(self) -> tuple[torch.Tensor, torch.Tensor]:
        """First and second moment, fp32, in the shape of the shard."""
        return self._first, self._second

    def store(self, first: torch.Tensor, second: torch.Tensor, step: int) -> None:
        """Keep the moments after `step`. In fp32 the optimizer has updated what `load` returned in place."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is stored, by name; shares memory."""
        return {"exp_avg": self._first, "exp_avg_sq": self._second}


class Bf16Moments(Moments):
    """Rounded to bf16: the first moment to nearest, the second at random, in proportion to the distance.

    A step changes the second moment by 1 - beta2, 0.1 % of it; rounding to nearest would drop every change below 0.2 %.
    """

    def __init__(self, name: str, like: torch.Tensor) -> None:
        super().__init__(like, torch.bfloat16)
        self._seed = zlib.crc32(name.encode())

    def load(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._first.float(), self._second.float()

    def store(self, first: torch.Tensor, second: torch.Tensor, step: int) -> None:
        self._first.copy_(first)
        # the same on every rank that holds this shard, and after a restart
        generator = torch.Generator(second.device).manual_seed(self._seed + step)
        noise = torch.randint(0, 1 << 16, second.shape, dtype=torch.int32, device=second.device, generator=generator)
        # bf16 is the upper half of fp32; moments are not negative
        self._second.copy_(((second.view(torch.int32) + noise) & ~0xFFFF).view(torch.float32))


class QuantizedMoments(Moments):
    """8-bit blockwise dynamic quantization (Dettmers et al., arXiv:2110.02861).

    Each block of up to BLOCK elements of a row is divided by its largest magnitude, and each element becomes the index
    of the nearest of 256 values that are denser around zero. Blocks do not cross rows, so rows can be on other ranks
    when a checkpoint is loaded. Of the second moment its square root is stored, which has the first one's range: a
    second moment rounded to zero beside a first one that was not would make AdamW divide by its epsilon.
    """

    def __init__(self, like: torch.Tensor) -> None:
        blocks = (*like.shape[:-1], -(-like.shape[-1] // BLOCK))
        self._codes = [_code(signed).to(like.device) for signed in (True, False)]
        # the code of zero, which is one of the values of both
        self._indices = [torch.full_like(like, int((code == 0).nonzero()), dtype=torch.uint8) for code in self._codes]
        self._scales = [torch.zeros(blocks, device=like.device) for _ in self._codes]

    def load(self) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = (
            code[indices.int()] * _spread(scales, indices.shape[-1])
            for code, indices, scales in zip(self._codes, self._indices, self._scales, strict=True)
        )
        return first, second.square_()

    def store(self, first: torch.Tensor, second: torch.Tensor, step: int) -> None:
        for moment, code, indices, scales in zip(
            (first, second.sqrt()), self._codes, self._indices, self._scales, strict=True
        ):
            width = moment.shape[-1]
            padded = torch.nn.functional.pad(moment.abs(), (0, -width % BLOCK))
            scales.copy_(padded.unflatten(-1, (-1, BLOCK)).amax(-1))
            relative = moment / _spread(scales, width).clamp_min(torch.finfo(torch.float32).tiny)
            indices.copy_(torch.bucketize(relative, (code[1:] + code[:-1]) / 2))

    def tensors(self) -> dict[str, torch.Tensor]:
        names = ("exp_avg", "exp_avg_sq")
        return dict(zip(names, self._indices, strict=True)) | {
            f"{name}_scale": scales for name, scales in zip(names, self._scales, strict=True)
        }


def _spread(scales: torch.Tensor, width: int) -> torch.Tensor:
    """Each block's scale for each of its elements."""
    return scales.repeat_interleave(BLOCK, -1)[..., :width]


@cache
def _code(signed: bool) -> torch.Tensor:
    """The 256 values of the dynamic data type, ascending, from 1e-7 to 1 beside zero (arXiv:2110.02861, section 1.3).

    The number of leading zero bits is a decimal exponent, from 0 to -6; the bits after them are a linear fraction
    between 0.1 and 1. Signed values use one bit for the sign; unsigned ones have a bit more for the fraction.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        fractions = 1 << (exponent + (0 if signed else 1))
        edges = torch.linspace(0.1, 1, fractions + 1)
        middles = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (exponent - 6)).tolist()
        values += middles + ([-middle for middle in middles] if signed else [])
    assert len(values) == 256
    return torch.tensor(sorted(values))
