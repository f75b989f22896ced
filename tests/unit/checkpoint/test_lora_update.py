"""The arithmetic of a merge: torch's bits, whatever the shape, the rank, and the range that is asked for."""

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from threadpoolctl import threadpool_limits

from hyperpod_ft.checkpoint.adapters.lora import Update
from hyperpod_ft.checkpoint.formats.safetensors_file import read_file
from hyperpod_ft.checkpoint.merge import update as lora_update
from hyperpod_ft.checkpoint.merge.update import Updated
from hyperpod_ft.checkpoint.tensors.elements import STORED
from hyperpod_ft.checkpoint.tensors.layout import TORCH_NAME_OF_DTYPE, LogicalTensor
from hyperpod_ft.checkpoint.tensors.reading import Reader
from hyperpod_ft.errors import UserError
from tests.unit import blas


@dataclass
class Case:
    """Tensors in a file, and what torch makes of them."""

    tensors: dict[str, LogicalTensor]
    values: dict[str, torch.Tensor]
    scale: float

    @property
    def update(self) -> Update:
        return Update(Path("adapter"), self.tensors["a"], self.tensors["b"], self.scale)

    def expected(self) -> torch.Tensor:
        """As PEFT does it (tuners/lora/layer.py, `Linear.get_delta_weight` and `merge`)."""
        weight = self.values["weight"].clone()
        weight += (self.values["b"] @ self.values["a"]) * self.scale
        return weight


def make(directory: Path, shape: tuple[int, int], rank: int, scale: float, dtype: torch.dtype = torch.float32) -> Case:
    generator = torch.Generator().manual_seed(math.prod(shape) + rank)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    values = {
        "weight": random(*shape).mul(0.05).to(dtype),
        "a": random(rank, shape[1]),
        "b": random(shape[0], rank).mul(0.01),
    }
    save_file(values, directory / "all.safetensors")
    return Case({tensor.name: tensor for tensor in read_file(directory / "all.safetensors")}, values, scale)


def merged(case: Case, updates: Sequence[Update], dtype: str = "", cuts: Sequence[int] = ()) -> torch.Tensor:
    weight = case.tensors["weight"]
    dtype = dtype or weight.dtype
    out = np.empty(weight.elements, STORED[dtype])
    with Reader() as reader, threadpool_limits(1, "blas"):
        updated = Updated(reader, weight, updates, dtype)
        ends = [*cuts, weight.elements]
        for begin, end in zip([0, *cuts], ends, strict=True):
            updated.fill(begin, end, out[begin:end])
        assert not updated._products, "the factors are let go"
    bits = torch.from_numpy(out.view(f"i{out.itemsize}")).view(getattr(torch, TORCH_NAME_OF_DTYPE[dtype]))
    return bits.reshape(weight.shape)


@blas.needed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [1, 2, 3, 8, 16, 17, 32, 64, 100, 192])
@pytest.mark.parametrize("shape", [(16, 32), (33, 45), (4, 600), (500, 12), (257, 300)])
def test_bits_are_torchs(tmp_path: Path, dtype: torch.dtype, rank: int, shape: tuple[int, int]) -> None:
    for scale in (2.0, 0.75, 64 / math.sqrt(rank)):
        case = make(tmp_path, shape, rank, scale, dtype)
        assert torch.equal(merged(case, [case.update]), case.expected()), scale


@blas.needed
@pytest.mark.parametrize("rank", [200, 256, 320, 384, 400, 512, 768])
def test_bits_are_torchs_beyond_one_chain(tmp_path: Path, rank: int) -> None:
    case = make(tmp_path, (260, 300), rank, 1.5)
    assert torch.equal(merged(case, [case.update]), case.expected())


@pytest.mark.parametrize("rank", [5, 193, 500])
@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (3, 5), (130, 70)])
def test_any_shape_is_right_within_rounding(tmp_path: Path, rank: int, shape: tuple[int, int]) -> None:
    case = make(tmp_path, shape, rank, 1.7)
    exact = case.values["weight"].double() + (case.values["b"].double() @ case.values["a"].double()) * 1.7
    torch.testing.assert_close(merged(case, [case.update]).double(), exact, rtol=1e-5, atol=1e-6)


def test_fp64_is_computed_in_fp64(tmp_path: Path) -> None:
    case = make(tmp_path, (64, 80), 16, 0.75, torch.float64)
    exact = case.values["weight"] + (case.values["b"].double() @ case.values["a"].double()) * 0.75
    torch.testing.assert_close(merged(case, [case.update]), exact, rtol=1e-14, atol=1e-16)


def test_any_range_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(tmp_path, (97, 61), 4, 0.75, torch.bfloat16)
    whole = merged(case, [case.update])
    random = np.random.default_rng(0)
    for size in (1, 100, 1 << 17):
        monkeypatch.setattr(lora_update, "_BLOCK_ELEMENTS", size)
        for count in (1, 3, 40):
            cuts = sorted(int(cut) for cut in random.integers(0, 97 * 61, count))
            assert torch.equal(merged(case, [case.update], cuts=cuts), whole), cuts
    assert torch.equal(merged(case, [case.update], cuts=[61, 122, 183, 184]), whole)


def test_another_dtype_is_rounded_once_from_the_sum(tmp_path: Path) -> None:
    case = make(tmp_path, (70, 61), 4, 0.75, torch.bfloat16)
    exact = case.values["weight"].float() + (case.values["b"] @ case.values["a"]) * 0.75
    assert torch.equal(merged(case, [case.update], "F32", cuts=[1000]), exact)
    assert torch.equal(merged(case, [case.update], "F16"), exact.half())


def test_several_updates_are_added_before_the_one_rounding(tmp_path: Path) -> None:
    case = make(tmp_path, (70, 64), 4, 0.75, torch.bfloat16)
    twice = Update(Path("other"), case.tensors["a"], case.tensors["b"], -2.0)
    delta = case.values["b"] @ case.values["a"]
    exact = case.values["weight"].double() + delta.double() * (0.75 - 2.0)
    found = merged(case, [case.update, twice])
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-7)
    # a rounding in between would have moved many of them
    assert (found != exact.bfloat16()).sum() <= 2


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e30, 3e38])
def test_what_is_no_number_is_refused(tmp_path: Path, wrong: float) -> None:
    case = make(tmp_path, (70, 64), 4, 0.75, torch.float16)
    case.values["b"][51, 2] = wrong
    save_file(case.values, tmp_path / "all.safetensors")
    with pytest.raises(UserError, match=r"adapter: tensor weight merged as F16 holds (NaN|Inf)"):
        merged(case, [case.update])


def test_threads_share_the_factors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(tmp_path, (400, 64), 4, 0.75)
    loads = []
    floats = Reader.floats
    monkeypatch.setattr(Reader, "floats", lambda *arguments: loads.append(threading.get_ident()) or floats(*arguments))
    weight = case.tensors["weight"]
    out = np.empty(weight.elements, np.float32)
    with Reader() as reader, threadpool_limits(1, "blas"), ThreadPoolExecutor(8) as pool:
        updated = Updated(reader, weight, [case.update], "F32")
        begins = range(0, weight.elements, 100)
        list(pool.map(lambda begin: updated.fill(begin, begin + 100, out[begin : begin + 100]), begins))
        assert not updated._products
    assert len(loads) == 2
    torch.testing.assert_close(torch.from_numpy(out.reshape(400, 64)), case.expected(), rtol=1e-6, atol=1e-7)


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
    torch.testing.assert_close(found, case.expected(), rtol=2**-8, atol=0)


def test_a_weight_that_ends_early_is_refused(tmp_path: Path) -> None:
    case = make(tmp_path, (700, 300), 4, 0.75)
    end = max(piece.offset for tensor in case.tensors.values() for piece in tensor.pieces)
    with (tmp_path / "all.safetensors").open("r+b") as stream:
        stream.truncate(end + 700 * 300)
    with pytest.raises(UserError, match="ended early"):
        merged(case, [case.update])
