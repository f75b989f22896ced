"""Staging copies the parts that a rank saves, not the storages that they are views of, into memory that it keeps."""

from typing import Any

import torch

from hyperpod_ft.engines.torch.checkpoints import Stager
from hyperpod_ft.engines.torch.sharding.shards import Pieces


def tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, dict):
        return [tensor for inner in state.values() for tensor in tensors(inner)]
    return [values for _, values in state.boxes] if isinstance(state, Pieces) else [state]


def test_parts_alone_are_copied() -> None:
    whole = torch.arange(60.0).view(10, 6)
    boxes = [((5, 0), whole[5:7]), ((9, 0), whole[9:])]
    part = Pieces(whole.shape, whole.dtype, whole.device, boxes)
    state = {"model": {"weight": part, "norm": whole[0]}, "random": {"1": {"cpu": torch.get_rng_state()}}}
    staged = Stager(pinned=False).stage(state)
    copy = staged["model"]["weight"]
    assert (copy.shape, [start for start, _ in copy.boxes]) == (part.shape, [(5, 0), (9, 0)])
    for found, original in zip(tensors(staged), tensors(state), strict=True):
        assert torch.equal(found, original)
        assert found.untyped_storage().nbytes() == original.nbytes
        assert found.data_ptr() != original.data_ptr()


def test_the_next_checkpoint_uses_the_same_memory() -> None:
    stager, weight = Stager(pinned=False), torch.zeros(3, 2)
    first = stager.stage({"model": {"weight": weight}})["model"]["weight"]
    weight += 1
    assert not first.any(), "training does not change what is being written"
    again = stager.stage({"model": {"weight": weight}})["model"]["weight"]
    assert again.data_ptr() == first.data_ptr()
    assert again.all()
    rounded = stager.stage({"model": {"weight": weight.bfloat16()}})["model"]["weight"]
    assert rounded.dtype == torch.bfloat16
    assert again.all()
