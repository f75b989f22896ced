"""Elements as numbers: every value and every rounding is torch's."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hyperpod_ft.checkpoint.tensors.elements import STORED, convert, narrow, nonfinite, widen
from hyperpod_ft.checkpoint.tensors.logical_tensor import TORCH_NAME_OF_DTYPE


def torch_dtype(dtype: str) -> torch.dtype:
    return getattr(torch, TORCH_NAME_OF_DTYPE[dtype])


def as_torch(stored: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(stored.view(f"i{stored.itemsize}")).view(torch_dtype(dtype))


def as_stored(tensor: torch.Tensor, dtype: str) -> np.ndarray:
    number = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[tensor.itemsize]
    return tensor.view(number).numpy().view(STORED[dtype])


def awkward_floats() -> np.ndarray:
    """fp32 patterns around everything that rounding can get wrong."""
    random = np.random.default_rng(0)
    any_bits = random.integers(0, 1 << 32, 1 << 18, dtype=np.uint64).astype(np.uint32)
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    halves = np.concatenate([upper + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    # on both sides of, and half way between, the numbers that F16 has, its subnormals too
    numbers = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    between = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)
    near = np.concatenate([between, np.nextafter(between, np.float32(0)), np.nextafter(between, np.float32(np.inf))])
    edges = np.array([65519.996, 65520, 3.3961775e38, 3.3895314e38, 1e-45, 1.1754942e-38], np.float32)
    return np.concatenate([any_bits, halves, near.view(np.uint32), (-near).view(np.uint32), edges.view(np.uint32)])


def same(ours: np.ndarray, theirs: np.ndarray, dtype: str) -> bool:
    """Bit for bit, but for which NaN it is."""
    nan = torch.isnan(as_torch(theirs, dtype)).numpy()
    return bool(np.array_equal(torch.isnan(as_torch(ours, dtype)).numpy(), nan)) and bool(
        np.array_equal(ours.view(f"u{ours.itemsize}")[~nan], theirs.view(f"u{theirs.itemsize}")[~nan])
    )


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_pattern_widens_as_torch_does(dtype: str) -> None:
    everything = np.arange(1 << 16, dtype=np.uint16).view(STORED[dtype])
    for stored in (everything, everything[:0x7C00], everything[0x8000:0xFC00]):
        expected = as_torch(stored, dtype).float().numpy()
        values = widen(stored, dtype)
        assert values.dtype == np.float32 and same(values, expected, "F32")


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_rounding_is_torchs(dtype: str) -> None:
    everything = awkward_floats().view(np.float32)
    with np.errstate(invalid="ignore"):
        in_range = everything[np.abs(everything) < 65520]
    for values, found in ((everything, "NaN"), (in_range, "")):
        out = np.empty(values.shape, STORED[dtype])
        assert narrow(values, dtype, out) == found
        assert same(out, as_stored(torch.from_numpy(values).to(torch_dtype(dtype)), dtype), dtype)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
def test_rounding_tells_what_it_found(dtype: str) -> None:
    def found(*values: float) -> str:
        array = np.array(values, np.float64 if dtype == "F64" else np.float32)
        out = np.empty(array.shape, STORED[dtype])
        kind = narrow(array, dtype, out)
        assert kind == nonfinite(out, dtype)
        return kind

    for value in (*map(float, np.array([65519.996, 65520, 3.3895314e38, 3.3961775e38], np.float32)), np.inf, 0.0):
        for sign in (1, -1):
            found(1.0, sign * value)
    assert found(1.0, -2.0) == ""
    assert found() == ""
    assert found(np.inf, 1.0) == "Inf"
    assert found(-np.inf, np.nan, 1.0) == "NaN"


def patterns(dtype: str) -> Iterator[np.ndarray]:
    """All there are, one by one where that is quick."""
    if STORED[dtype].itemsize <= 2:
        count = 1 << (8 * STORED[dtype].itemsize)
        step = max(1, count // 512)
        yield from np.arange(0, count, step, dtype=f"u{STORED[dtype].itemsize}").view(STORED[dtype])[:, None]
    if dtype in ("F16", "F32", "F64"):
        yield from np.array([1.0, np.inf, -np.inf, np.nan, -np.nan, -1.0, 0.0], STORED[dtype])[:, None]


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"])
def test_what_is_no_number_is_found(dtype: str) -> None:
    quiet = np.zeros(100, STORED[dtype])
    for pattern in patterns(dtype):
        value = as_torch(pattern, dtype).double()
        wanted = "NaN" if bool(torch.isnan(value)) else "Inf" if bool(torch.isinf(value)) else ""
        assert nonfinite(pattern, dtype) == wanted, pattern
        quiet[57] = pattern[0]
        assert nonfinite(quiet.reshape(10, 10), dtype) == wanted
    assert nonfinite(quiet[:0], dtype) == ""


def test_integers_are_always_finite() -> None:
    assert nonfinite(np.full(3, -1, np.int32), "I32") == ""


@pytest.mark.parametrize("source", ["F64", "F32", "F16", "BF16"])
@pytest.mark.parametrize("target", ["F32", "F16", "BF16"])
def test_conversion_is_torchs(source: str, target: str) -> None:
    random = np.random.default_rng(1)
    values = torch.from_numpy(random.standard_normal(200_001) * 10.0 ** random.integers(-9, 6, 200_001))
    stored = as_stored(values.to(torch_dtype(source)), source)
    out = np.empty(stored.shape, STORED[target])
    convert(stored, source, target, out)
    if (source, target) == ("F64", "F16"):  # torch rounds to fp32 on the way
        assert same(out, stored.astype(np.float16), target)
    else:
        assert same(out, as_stored(as_torch(stored, source).to(torch_dtype(target)), target), target)


def test_a_range_with_gaps_between_rows_is_rounded_too() -> None:
    values = np.random.default_rng(2).standard_normal((5, 32)).astype(np.float32)[:, :7]
    out = np.empty((5, 7), np.uint16)
    assert narrow(values, "BF16", out) == ""
    assert np.array_equal(out, as_stored(torch.tensor(values.copy()).bfloat16(), "BF16"))
