"""The DCP reader: what real processes saved comes back exactly; whatever is damaged or hostile is refused."""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hyperpod_ft.checkpoint.sharded import dcp
from hyperpod_ft.checkpoint.tensors import reading
from hyperpod_ft.errors import UserError
from tests.unit import tiny_checkpoints
from tests.unit.tensor_values import TORCH_DTYPE, gather
from tests.unit.tiny_checkpoints import Sharding

TENSORS = {
    "column": torch.randn(6, 5),
    "row": torch.randn(6, 5, dtype=torch.bfloat16),
    "uneven": torch.randn(3, 4),
    "narrow": torch.randn(1, 4),  # the second rank holds nothing of it
    "replicated": torch.randn(7).half(),
    "scalar": torch.tensor(2.5),
    "counts": torch.arange(5),
}
DIMS = {"column": 0, "row": 1, "uneven": 0, "narrow": 0}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dcp")
    tiny_checkpoints.save_sharded(root / "work", [Sharding(root / "step", TENSORS, DIMS)])
    return root / "step"


@pytest.fixture
def checkpoint(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "copy"))


@pytest.mark.parametrize("block_bytes", [1, 24, 1 << 20])
def test_reads_what_two_ranks_saved(sharded: Path, block_bytes: int) -> None:
    tensors = {tensor.name: tensor for tensor in dcp.read(sharded, "model.")[0]}
    assert tensors.keys() == TENSORS.keys()
    assert len(tensors["column"].pieces) == len(tensors["row"].pieces) == 2
    for name, expected in TENSORS.items():
        assert tensors[name].shape == tuple(expected.shape)
        assert TORCH_DTYPE[tensors[name].dtype] == expected.dtype
        assert torch.equal(gather(tensors[name]), expected)
        # each block is overwritten by the next
        content = b"".join(block.tobytes() for block in reading.blocks(tensors[name], block_bytes))
        assert content == gather(tensors[name]).contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_a_piece_may_have_any_strides(tmp_path: Path) -> None:
    transposed = torch.randn(5, 6).t()
    tiny_checkpoints.save_whole(tmp_path / "step", {"transposed": transposed})
    (tensor,), _ = dcp.read(tmp_path / "step", "model.")
    assert tensor.pieces[0].strides == (1, 6)
    assert torch.equal(gather(tensor), transposed)
    content = b"".join(block.tobytes() for block in reading.blocks(tensor, 24))
    assert content == transposed.contiguous().numpy().tobytes()


def test_prefix_chooses_and_is_cut_off(sharded: Path) -> None:
    names = {tensor.name for tensor in dcp.read(sharded, "optimizer.")[0]}
    assert names == {f"{name}.exp_avg" for name in TENSORS}


def test_a_missing_file_is_refused(checkpoint: Path) -> None:
    (checkpoint / "__1_0.distcp").unlink()
    with pytest.raises(UserError, match=r"__1_0\.distcp: is missing"):
        dcp.read(checkpoint)


def test_a_missing_index_is_refused(checkpoint: Path) -> None:
    (checkpoint / ".metadata").unlink()
    with pytest.raises(UserError, match=r"\.metadata: is missing"):
        dcp.read(checkpoint)


def test_every_truncation_is_refused(checkpoint: Path) -> None:
    file = checkpoint / "__1_0.distcp"
    content = file.read_bytes()
    for length in range(0, len(content) - 1, 499):
        file.write_bytes(content[:length])
        with pytest.raises(UserError):
            dcp.read(checkpoint)


def test_a_truncated_index_is_refused(checkpoint: Path) -> None:
    index = checkpoint / ".metadata"
    content = index.read_bytes()
    for length in range(0, len(content), 37):
        index.write_bytes(content[:length])
        with pytest.raises(UserError, match="cannot be read"):
            dcp.read(checkpoint)


def _rewrite(checkpoint: Path, change: Any) -> None:
    index = checkpoint / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    change(metadata)
    index.write_bytes(pickle.dumps(metadata))


def test_a_piece_that_no_file_holds_is_refused(checkpoint: Path) -> None:
    def forget(metadata: Any) -> None:
        gone = next(key for key in metadata.storage_data if key.fqn == "model.row" and key.offset == (0, 3))
        del metadata.storage_data[gone]

    _rewrite(checkpoint, forget)
    with pytest.raises(UserError, match=r"model\.row, piece at \[0, 3\]: is missing"):
        dcp.read(checkpoint)


def test_pieces_that_do_not_cover_the_tensor_are_refused(checkpoint: Path) -> None:
    _rewrite(checkpoint, lambda metadata: metadata.state_dict_metadata["model.row"].chunks.pop())
    with pytest.raises(UserError, match=r"tensor model\.row is incomplete: its 1 pieces hold 18 elements of 30"):
        dcp.read(checkpoint)


def test_pieces_that_overlap_are_refused(checkpoint: Path) -> None:
    def overlap(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata["model.column"].chunks
        chunks[1] = chunks[0]

    _rewrite(checkpoint, overlap)
    with pytest.raises(UserError, match=r"tensor model\.column is incomplete"):
        dcp.read(checkpoint)


def test_a_file_outside_the_checkpoint_is_refused(checkpoint: Path) -> None:
    def escape(metadata: Any) -> None:
        for stored in metadata.storage_data.values():
            stored.relative_path = "../elsewhere.distcp"

    _rewrite(checkpoint, escape)
    with pytest.raises(UserError, match="outside the directory"):
        dcp.read(checkpoint)


class _Payload:
    def __init__(self, call: Any, *arguments: Any) -> None:
        self._reduced = (call, arguments)

    def __reduce__(self) -> Any:
        return self._reduced


@pytest.mark.parametrize("call", [os.system, eval, exec, __import__])
def test_a_hostile_index_is_refused_and_not_run(checkpoint: Path, tmp_path: Path, call: Any) -> None:
    witness = tmp_path / "witness"
    argument = f"touch {witness}" if call is os.system else f"open({str(witness)!r}, 'w')"
    (checkpoint / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": _Payload(call, argument)}))
    with pytest.raises(UserError, match="refused: names"):
        dcp.read(checkpoint)
    assert not witness.exists()


def test_getattr_of_the_index_reaches_nothing(checkpoint: Path) -> None:
    # Python 3.11 needs the name for enumerations; it must not give a real attribute
    (checkpoint / ".metadata").write_bytes(pickle.dumps(_Payload(getattr, "text", "upper")))
    with pytest.raises(UserError, match="does not describe a checkpoint"):
        dcp.read(checkpoint)


def test_a_hostile_piece_is_refused_and_not_run(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    tiny_checkpoints.save_whole(tmp_path / "step", {"weight": torch.ones(2)})
    file = tmp_path / "step" / "__0_0.distcp"
    torch.save(_Payload(os.system, f"touch {witness}"), file)

    def resize(metadata: Any) -> None:
        for stored in metadata.storage_data.values():
            stored.offset, stored.length = 0, file.stat().st_size

    _rewrite(tmp_path / "step", resize)
    with pytest.raises(UserError, match=r"refused: names posix\.system"):
        dcp.read(tmp_path / "step")
    assert not witness.exists()
