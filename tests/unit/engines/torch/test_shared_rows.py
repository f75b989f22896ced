"""The part of a row that a rank computes."""

import torch

from hyperpod_ft.engines.batches import Batch
from hyperpod_ft.engines.torch.model import language_model
from hyperpod_ft.engines.torch.model.context_parallel import Chunk


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
