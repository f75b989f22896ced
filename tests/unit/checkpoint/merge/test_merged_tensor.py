"""The arithmetic of a merge: right within the bounds of rounding, the same bits for any ranges and any threads."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from threadpoolctl import threadpool_limits

from hyperpod_ft.checkpoint.adapters.lora import Update
from hyperpod_ft.checkpoint.formats.safetensors_file import read_file
from hyperpod_ft.checkpoint.merge import merged_tensor
from hyperpod_ft.checkpoint.merge.merged_tensor import MergedTensor
from hyperpod_ft.checkpoint.tensors.elements import STORED
from hyperpod_ft.checkpoint.tensors.logical_tensor import TORCH_NAME_OF_DTYPE, LogicalTensor
from hyperpod_ft.errors import UserError
from tests.unit.rounding import Bound


@dataclass
class Case:
    """Tensors in a file, and what an update makes of them."""

    tensors: dict[str, LogicalTensor]
    values: dict[str, torch.Tensor]
    scale: float
    kind: str = "linear"
    dora: bool = False

    @property
    def update(self) -> Update:
        magnitude = self.tensors["magnitude"] if self.dora else None
        a, b = self.tensors["a"], self.tensors["b"]
        return Update(Path("adapter"), a, b, self.scale, self.transposed, magnitude, self.kind == "embedding")

    @property
    def transposed(self) -> bool:
        return self.kind != "linear"

    def bound(self, dtype: torch.dtype, *scales: float) -> Bound:
        """Of the result, that will be written as `dtype`; `scales`: of several updates with the same factors."""
        # so precise that its own rounding does not count, in fp64 neither
        weight, a, b = (self.values[name].double().numpy().astype(np.longdouble) for name in ("weight", "a", "b"))
        scales = scales or (self.scale,)
        delta, magnitude = (b @ a) * sum(scales), (abs(b) @ abs(a)) * sum(map(abs, scales))
        if self.transposed:
            delta, magnitude = delta.T, magnitude.T
        arithmetic = torch.float64 if self.values["weight"].dtype == torch.float64 else torch.float32
        rounded_to = dtype if self.kind == "embedding" and not self.dora else None
        rank = len(a) + len(scales) - 1
        bound = Bound.of_sum(weight, delta, magnitude, rank, arithmetic=arithmetic, delta_rounded_to=rounded_to)
        if self.dora:
            norms = self.values["magnitude"].numpy().astype(np.longdouble)
            bound = bound.rescaled(norms, 0 if self.transposed else 1, arithmetic)
        if arithmetic == torch.float64 and dtype == torch.bfloat16:
            # by way of fp32, as in torch
            bound.error += 2.0**-24 * (abs(bound.exact) + bound.error)
        return bound


def make(
    directory: Path,
    shape: tuple[int, int],
    rank: int,
    scale: float,
    dtype: torch.dtype = torch.float32,
    kind: str = "linear",
    *,
    dora: bool = False,
) -> Case:
    generator = torch.Generator().manual_seed(math.prod(shape) + rank)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    outputs, inputs = shape if kind == "linear" else shape[::-1]
    values = {
        "weight": random(*shape).mul(0.05).to(dtype),
        "a": random(rank, inputs),
        "b": random(outputs, rank).mul(0.01),
        "magnitude": random(outputs).abs(),
    }
    save_file(values, directory / "all.safetensors")
    tensors = {tensor.name: tensor for tensor in read_file(directory / "all.safetensors")}
    return Case(tensors, values, scale, kind, dora)


def merged(
    case: Case, updates: Sequence[Update], dtype: str = "", cuts: Sequence[int] = (), threads: int = 1
) -> torch.Tensor:
    weight = case.tensors["weight"]
    dtype = dtype or weight.dtype
    out = np.empty(weight.elements, STORED[dtype])
    ends = [*cuts, weight.elements]
    with threadpool_limits(1, "blas"), ThreadPoolExecutor(threads) as pool:
        tensor = MergedTensor(weight, tuple(updates))
        fills = [
            pool.submit(tensor.fill, dtype, begin, end, out[begin:end])
            for begin, end in zip([0, *cuts], ends, strict=True)
            if begin < end
        ]
        for fill in fills:
            fill.result()
        assert not tensor._loaded, "the factors are released"
    bits = torch.from_numpy(out.view(f"i{out.itemsize}")).view(getattr(torch, TORCH_NAME_OF_DTYPE[dtype]))
    return bits.reshape(weight.shape)


DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
SIZES = st.integers(1, 70) | st.sampled_from([15, 16, 17, 33])
# those around the sizes at which BLAS libraries begin to sum in several parts, and this module in other tiles
RANKS = st.integers(1, 512) | st.sampled_from([1, 8, 16, 192, 193, 200, 384, 385])
bounded = settings(deadline=None, max_examples=60, database=None)


@st.composite
def updates(draw: st.DrawFn) -> tuple[tuple[int, int], int, float, torch.dtype, str, bool]:
    """Arguments of `make`."""
    return (
        (draw(SIZES), draw(SIZES)),
        draw(RANKS),
        draw(st.sampled_from([2.0, 0.75, 1.7, -0.4, 64 / math.sqrt(7)])),
        draw(st.sampled_from(list(DTYPES.values()))),
        draw(st.sampled_from(["linear", "transposed", "embedding"])),
        draw(st.booleans()),
    )


@bounded
@given(updates(), st.sampled_from(list(DTYPES)))
@example(((33, 45), 200, 1.5, torch.float32, "linear", False), "F32")
@example(((70, 61), 385, 1.7, torch.bfloat16, "transposed", True), "F16")
@example(((17, 30), 8, 2.0, torch.float64, "embedding", False), "BF16")
def test_every_element_is_right_within_rounding(
    made: tuple[tuple[int, int], int, float, torch.dtype, str, bool], written_as: str
) -> None:
    *arguments, dora = made
    with TemporaryDirectory() as work:
        case = make(Path(work), *arguments, dora=dora)
        found = merged(case, [case.update], written_as)
        assert case.bound(DTYPES[written_as]).holds(found)


@bounded
@given(updates(), st.sampled_from(list(DTYPES)), st.data())
def test_any_ranges_and_any_threads_give_the_same_bits(
    made: tuple[tuple[int, int], int, float, torch.dtype, str, bool], written_as: str, data: st.DataObject
) -> None:
    *arguments, dora = made
    shape: tuple[int, int] = made[0]
    cuts = sorted(data.draw(st.lists(st.integers(0, math.prod(shape)), min_size=1, max_size=12)))
    with TemporaryDirectory() as work, pytest.MonkeyPatch.context() as patch:
        case = make(Path(work), *arguments, dora=dora)
        whole = merged(case, [case.update], written_as)
        patch.setattr(merged_tensor, "_BLOCK_ELEMENTS", data.draw(st.sampled_from([1, 500, 1 << 17])))
        threads = data.draw(st.sampled_from([1, 2, 5]))
        assert torch.equal(merged(case, [case.update], written_as, cuts, threads), whole)


def test_a_large_weight_has_the_same_bits_in_any_ranges(tmp_path: Path) -> None:
    """Several blocks, and several calls of BLAS for a row of tiles."""
    case = make(tmp_path, (150, 4099), 40, 1.7, torch.bfloat16)
    whole = merged(case, [case.update])
    for cuts in ([1], [4099 * 5 + 3, 4099 * 77], list(range(100_000, 150 * 4099, 100_001))):
        assert torch.equal(merged(case, [case.update], cuts=cuts, threads=2), whole), cuts


def test_several_updates_are_added_before_the_one_rounding(tmp_path: Path) -> None:
    case = make(tmp_path, (70, 64), 4, 0.75, torch.bfloat16)
    twice = Update(Path("other"), case.tensors["a"], case.tensors["b"], -2.0)
    # a rounding in between would move many by more than the bound
    assert case.bound(torch.bfloat16, 0.75, -2.0).holds(merged(case, [case.update, twice]))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e30, 3e38])
def test_what_is_no_number_is_refused(tmp_path: Path, wrong: float) -> None:
    case = make(tmp_path, (70, 64), 4, 0.75, torch.float16)
    case.values["b"][51, 2] = wrong
    save_file(case.values, tmp_path / "all.safetensors")
    with pytest.raises(UserError, match=r"adapter: tensor weight merged as F16 holds (NaN|Inf)"):
        merged(case, [case.update])


@pytest.mark.parametrize("padding", [0, 1, 2, 3])
def test_a_weight_may_begin_anywhere_in_its_file(tmp_path: Path, padding: int) -> None:
    case = make(tmp_path, (700, 300), 4, 0.75, torch.bfloat16)
    file = tmp_path / "all.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length] + b" " * padding
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    moved = Case({tensor.name: tensor for tensor in read_file(file)}, case.values, case.scale)
    found = merged(moved, [moved.update], cuts=[100_000, 130_000])
    assert case.bound(torch.bfloat16).holds(found)


def test_a_weight_that_ends_early_is_refused(tmp_path: Path) -> None:
    case = make(tmp_path, (700, 300), 4, 0.75)
    end = max(piece.offset for tensor in case.tensors.values() for piece in tensor.pieces)
    with (tmp_path / "all.safetensors").open("r+b") as stream:
        stream.truncate(end + 700 * 300)
    with pytest.raises(UserError, match="is truncated"):
        merged(case, [case.update])
