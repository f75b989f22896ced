"""Shards of tensors that lie in several places: what ranks hold, and what a checkpoint saves of them."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh

from hyperpod_ft.engines.torch.sharding.shards import Pieces, RankShard, TensorSplit


class OneRank:
    """Stands in for a mesh, of which boxes need nothing."""


def shard(split: TensorSplit, rows: int, shard_ranks: int, index: int) -> RankShard:
    mesh: DeviceMesh = OneRank()  # type: ignore[assignment]
    return RankShard(split, rows, shard_ranks, index, mesh)


WHOLE = torch.arange(24.0).view(6, 4)


@pytest.mark.parametrize("dim", [0, 1])
def test_boxes_are_where_the_values_come_from(dim: int) -> None:
    """The second of two tensor-parallel ranks: the last half of each of two parts, its rows over two shard ranks."""
    ranges = (range(1, 2), range(4, 6)) if dim == 0 else (range(1, 2), range(3, 4))
    split = TensorSplit(WHOLE.shape, dim, ranges, index=1, ranks=2)
    own = split.take(WHOLE)
    seen = torch.zeros_like(WHOLE)
    for index in range(2):
        here = shard(split, own.shape[0], 2, index)
        for start, values in here.boxes(here.take(own)):
            place = tuple(slice(a, a + n) for a, n in zip(start, values.shape, strict=True))
            assert torch.equal(values, WHOLE[place]) and values.numel()
            seen[place] += 1
    expected = torch.zeros_like(WHOLE)
    expected.index_fill_(dim, torch.tensor([i for own in ranges for i in own]), 1)
    assert torch.equal(seen, expected)


def test_scales_of_blocks_of_a_divided_row_lie_rank_by_rank() -> None:
    split = TensorSplit(WHOLE.shape, 1, (range(1, 2), range(3, 4)), index=1, ranks=2)
    wrapped = shard(split, 6, 1, 0).wrap(torch.zeros(6, 1))
    assert isinstance(wrapped, Pieces) and wrapped.shape == (6, 2)
    assert [start for start, _ in wrapped.boxes] == [(0, 1)]


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    split = TensorSplit(WHOLE.shape, 0, (range(1, 2), range(4, 6)), index=0, ranks=1)
    other = TensorSplit(WHOLE.shape, 0, (range(1), range(2, 4)), index=0, ranks=1)
    values = split.take(WHOLE), other.take(WHOLE)
    boxes = [*shard(split, 3, 1, 0).boxes(values[0]), *shard(other, 3, 1, 0).boxes(values[1])]
    state = {"model": {"weight": Pieces(WHOLE.shape, WHOLE.dtype, WHOLE.device, boxes)}}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    found = {"model": {"weight": torch.zeros(6, 4)}}
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(found["model"]["weight"], WHOLE)
