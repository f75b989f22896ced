"""Rows divided over two ranks, for every family whose attention the engine computes."""

import multiprocessing
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AttentionInterface

from hyperpod_ft.data.packing import IGNORED
from hyperpod_ft.engines.batches import Batch
from hyperpod_ft.engines.torch.model import attention, language_model
from hyperpod_ft.engines.torch.model.context_parallel import Chunk, chunk_of, divide_attention
from hyperpod_ft.planning.packing_rules import SEPARATING_FAMILIES
from tests.unit.planning.test_packing_rules import Result, difference, documents, gradients, model_of

# two rows, whose documents' borders are not those of chunks
ROWS = 2


def batch() -> Batch:
    row = torch.cat(documents(), 1)
    ids = torch.cat([row.roll(number, 1) for number in range(ROWS)])
    lengths = [part.shape[1] for part in documents()]
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(ROWS, -1)
    return Batch(ids, torch.where(positions == 0, IGNORED, ids), positions)


def result(family: str, chunk: Chunk) -> Result:
    model = model_of(family, attention.NAME)
    language_model.return_loss(model)
    return gradients(model, model(**language_model.inputs(batch(), torch.device("cpu"), chunk=chunk)))


def differences(rank: int, store: Path) -> dict[str, float]:
    """Of the sums over two ranks from what one computes, by family."""
    torch.set_num_threads(1)
    expected = {family: result(family, Chunk()) for family in SEPARATING_FAMILIES}
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    divide_attention(mesh)
    try:
        found = {family: result(family, chunk_of(mesh)) for family in sorted(SEPARATING_FAMILIES)}
        for tensors in found.values():
            for name in sorted(tensors):
                dist.all_reduce(tensors[name])
    finally:
        AttentionInterface.register(attention.NAME, attention.attend)
        dist.destroy_process_group()
    return {family: difference(tensors, expected[family]) for family, tensors in found.items()}


def test_two_ranks_compute_what_one_does(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        found = pool.starmap_async(differences, [(rank, tmp_path / "store") for rank in range(2)], chunksize=1).get(120)
    assert {family: off for family, off in found[0].items() if off > 1e-5} == {}


def test_chunks_are_consecutive() -> None:
    rows = torch.arange(16).view(2, 8)
    assert [Chunk(index, 4).of(rows).tolist() for index in (0, 3)] == [[[0, 1], [8, 9]], [[6, 7], [14, 15]]]
    assert torch.equal(Chunk().of(rows), rows)


def test_the_last_token_of_a_chunk_predicts_the_first_of_the_next() -> None:
    ids = torch.arange(10, 18)[None]
    whole = Batch(ids, ids, torch.arange(8)[None])
    halves = [language_model.inputs(whole, torch.device("cpu"), chunk=Chunk(index, 2)) for index in range(2)]
    assert [half["targets"].tolist() for half in halves] == [[11, 12, 13, 14], [15, 16, 17]]
    assert [half["predicted_at"].tolist() for half in halves] == [[0, 1, 2, 3], [0, 1, 2]]
