"""What each of two ranks of test_context_parallel.py runs: every family whose attention the engine computes.

    python -m forking_torchrun ... -m families_worker OUT_FILE

Rank 0 writes how far the sums of loss and gradients over both ranks, which share rows, are from what one rank computes.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hyperpod_ft.data.packing import IGNORED
from hyperpod_ft.engines.batches import Batch
from hyperpod_ft.engines.ranks import join_ranks
from hyperpod_ft.engines.torch.model import attention, language_model
from hyperpod_ft.engines.torch.model.context_parallel import SequenceChunk, chunk_of, divide_attention
from hyperpod_ft.planning.families import SEPARATING_FAMILIES
from tests.unit.planning.torch.test_packing_rules import Result, difference, documents, gradients, model_of

# whose documents' borders are not those of chunks
ROWS = 2


def batch() -> Batch:
    row = torch.cat(documents(), 1)
    ids = torch.cat([row.roll(number, 1) for number in range(ROWS)])
    lengths = [part.shape[1] for part in documents()]
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(ROWS, -1)
    return Batch(ids, torch.where(positions == 0, IGNORED, ids), positions)


def result(family: str, chunk: SequenceChunk) -> Result:
    model = model_of(family, attention.NAME)
    language_model.return_loss(model)
    return gradients(model, model(**language_model.inputs(batch(), torch.device("cpu"), chunk=chunk)))


def main() -> None:
    ranks = join_ranks(2)
    families = sorted(SEPARATING_FAMILIES)
    expected = {family: result(family, SequenceChunk()) for family in families} if ranks.is_rank_0 else {}
    dist.init_process_group("gloo", store=ranks.store, rank=ranks.rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    divide_attention(mesh)
    differences = {}
    for family in families:
        found = result(family, chunk_of(mesh))
        for name in sorted(found):
            dist.all_reduce(found[name])
        if ranks.is_rank_0:
            differences[family] = difference(found, expected[family])
    if ranks.is_rank_0:
        Path(sys.argv[1]).write_text(json.dumps(differences))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
