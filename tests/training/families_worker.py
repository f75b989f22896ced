"""What each of two ranks of test_context_parallel.py runs: families whose attention the engine computes.

    python -m forking_torchrun ... -m families_worker OUT_FILE DIRECTORY...

DIRECTORY: of a small model. Rank 0 writes how far the sums of loss and gradients over both ranks, which share rows, are
from what one rank computes.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hyperpod_ft.engines.batches import Batch
from hyperpod_ft.engines.certificate.alone import Trained
from hyperpod_ft.engines.certificate.model import documents, rows
from hyperpod_ft.engines.ranks import join_ranks
from hyperpod_ft.engines.torch.certificate.packing import engine_model
from hyperpod_ft.engines.torch.model import language_model
from hyperpod_ft.engines.torch.model.context_parallel import SequenceChunk, chunk_of, divide_attention


def batch() -> Batch:
    """Two rows; borders of their documents are not those of chunks."""
    found = [rows(texts, packed=True) for texts in (documents(), documents()[::-1])]
    names = vars(found[0])
    return Batch(**{name: torch.cat([torch.from_numpy(vars(row)[name]).long() for row in found]) for name in names})


def result(directory: Path, chunk: SequenceChunk) -> Trained:
    model = engine_model(directory, own_attention=True)
    return Trained.of(model, model(**language_model.inputs(batch(), torch.device("cpu"), chunk=chunk))[None])


def main() -> None:
    ranks = join_ranks(2)
    out, *directories = map(Path, sys.argv[1:])
    expected = {each: result(each, SequenceChunk()) for each in directories} if ranks.is_rank_0 else {}
    dist.init_process_group("gloo", store=ranks.store, rank=ranks.rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    divide_attention(mesh)
    differences = {}
    for directory in directories:
        found = result(directory, chunk_of(mesh))
        for tensor in (found.losses, *(found.gradients[name] for name in sorted(found.gradients))):
            dist.all_reduce(tensor)
        if ranks.is_rank_0:
            # the order of sums is another: up to 1e-5 on Intel, 1.6e-5 on AMD
            differences[directory.name] = found.differs(expected[directory], 2e-5)
    if ranks.is_rank_0:
        out.write_text(json.dumps(differences))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
