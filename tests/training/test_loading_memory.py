"""While a model is loaded, the ranks of a node together need little more memory than the model."""

from pathlib import Path

import pytest

from benchmarks.loading import load
from benchmarks.synthetic import Geometry, write_base

pytestmark = pytest.mark.training


def test_two_ranks_need_the_memory_of_one_model(tmp_path: Path) -> None:
    geometry = Geometry(layers=2, hidden=1024, intermediate=4096, heads=16, vocabulary=16000)
    write_base(tmp_path / "model", geometry)
    held = 2 * geometry.nbytes  # fp32 of bf16
    assert 200e6 < held < 300e6
    assert load("slices", 2, "float32", tmp_path / "model")["peak"] < 1.3 * held
