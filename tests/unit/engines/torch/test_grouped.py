"""Items whose communication is bundled: at most a bucket's bytes together, in their order."""

import pytest

from hyperpod_ft.engines.torch.sharding import data_parallel


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([], []),
        ([4, 4, 2, 1], [[4, 4, 2], [1]]),
        ([1, 30, 1, 1], [[1], [30], [1, 1]]),
        ([0, 0, 10, 0], [[0, 0, 10, 0]]),
        ([30, 0], [[30], [0]]),
    ],
)
def test_groups(monkeypatch: pytest.MonkeyPatch, sizes: list[int], groups: list[list[int]]) -> None:
    monkeypatch.setattr(data_parallel, "BUCKET_BYTES", 10)
    assert data_parallel.grouped(sizes, int) == groups
