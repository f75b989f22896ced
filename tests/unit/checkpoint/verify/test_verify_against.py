"""verify --against: equal content passes; differences are counted, measured and may be tolerated."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyperpod_ft.checkpoint.tensors.elements import STORED
from hyperpod_ft.checkpoint.verify.value_checks import difference
from hyperpod_ft.checkpoint.verify.verify import Verification, verify
from tests.unit.checkpoint.verify.written_models import arrays, change_json, write


def compared(found: Verification) -> tuple[int, int, float]:
    assert found.comparison is not None
    return found.comparison.equal, found.comparison.different, found.comparison.largest_difference


def test_another_sharding_is_the_same_content(tmp_path: Path) -> None:
    one = write(tmp_path / "one", arrays())
    other = write(tmp_path / "other", dict(reversed(arrays().items())), max_shard_bytes=1 << 20)
    found = verify(one, against=other)
    assert found.ok and compared(found) == (6, 0, 0.0)


def test_a_changed_value_is_found_and_may_be_tolerated(tmp_path: Path) -> None:
    expected = write(tmp_path / "expected", arrays())
    tensors = arrays()
    tensors["lm_head.weight"][3, 5] += 0.25
    directory = write(tmp_path / "model", tensors)
    found = verify(directory, against=expected)
    (finding,) = found.findings
    assert "tensor lm_head.weight: 1 of 384 values differ, by 0.25 at most" in finding
    assert compared(found)[:2] == (5, 1)
    assert verify(directory, against=expected, tolerance=0.26).ok
    assert not verify(directory, against=expected, tolerance=0.24).ok
    # zero and minus zero are not the same bits
    for sign, name in ((1, "zero"), (-1, "minus")):
        tensors["model.norm.weight"][:] = sign * 0.0
        write(tmp_path / name, tensors)
    assert not verify(tmp_path / "zero", against=tmp_path / "minus").ok
    assert verify(tmp_path / "zero", against=tmp_path / "minus", tolerance=1e-30).ok


def test_another_dtype_another_shape_and_other_names_are_found(tmp_path: Path) -> None:
    expected = write(tmp_path / "expected", arrays())
    half = write(
        tmp_path / "half", {name: array.astype(np.float16) for name, array in arrays().items()}, stored_as="F16"
    )
    change_json(half / "config.json", dtype="float16")
    found = verify(half, against=expected, tolerance=0.01)
    assert found.findings == (f"{half}, against {expected}: all 6 tensors are F16, should be F32",)
    assert compared(found)[:2] == (0, 6)
    assert 0 < compared(found)[2] < 0.01
    assert "values differ" in verify(half, against=expected).findings[0]
    tensors = arrays()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].reshape(4, 4)
    tensors["other"] = tensors.pop("lm_head.weight")
    found = verify(write(tmp_path / "model", tensors), against=expected)
    assert [finding.partition("tensor ")[2] for finding in found.findings] == [
        "lm_head.weight is missing",
        "model.norm.weight is [4, 4], should be [16]",
        "other is not expected",
    ]


def test_many_differences_are_summed_up(tmp_path: Path) -> None:
    expected = write(tmp_path / "expected", arrays(20), num_hidden_layers=20)
    directory = write(tmp_path / "model", {name: array + 1 for name, array in arrays(20).items()}, num_hidden_layers=20)
    found = verify(directory, against=expected)
    assert len(found.findings) == 11 and found.findings[-1].endswith("13 more tensors differ")
    assert compared(found) == (0, 23, pytest.approx(1))


def test_differences_of_all_kinds_of_numbers() -> None:
    def count_and_largest(left: list[Any], right: list[Any], dtype: str, tolerance: float = 0) -> tuple[int, float]:
        stored = [np.array(values, STORED[dtype]) for values in (left, right)]
        found = difference(stored[0], dtype, stored[1], dtype, tolerance)
        return found.elements, found.largest

    assert count_and_largest([1, 2, 3], [1, 2, 5], "I64") == (1, 2)
    assert count_and_largest([True, False], [True, True], "BOOL") == (1, 1)
    assert count_and_largest([0x3F80, 0x4000], [0x3F80, 0x4040], "BF16") == (1, 1)
    assert count_and_largest([np.nan, 1], [np.nan, 1], "F32") == (0, 0)
    assert count_and_largest([np.inf, 1], [np.inf, 2], "F64", 1) == (0, 1)
    count, largest = count_and_largest([np.nan, 1], [0, 9], "F32", 100)
    assert count == 1 and np.isnan(largest)
    assert count_and_largest([1, 2], [1, 3], "F8_E4M3")[0] == 1
