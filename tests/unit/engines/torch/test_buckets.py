"""Items whose communication is bundled: at most a bucket's bytes together, in their order."""

import pytest

from hyperpod_ft.engines.torch.sharding import trained_weights


@pytest.mark.parametrize(
    ("sizes", "buckets"),
    [
        ([], []),
        ([4, 4, 2, 1], [[4, 4, 2], [1]]),
        ([1, 30, 1, 1], [[1], [30], [1, 1]]),
        ([0, 0, 10, 0], [[0, 0, 10, 0]]),
        ([30, 0], [[30], [0]]),
    ],
)
def test_buckets(monkeypatch: pytest.MonkeyPatch, sizes: list[int], buckets: list[list[int]]) -> None:
    monkeypatch.setattr(trained_weights, "BUCKET_BYTES", 10)
    assert trained_weights.in_buckets(sizes, int) == buckets
