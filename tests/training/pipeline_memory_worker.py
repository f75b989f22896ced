"""What every rank of test_pipeline_memory.py runs: several runs, one after another.

    python -m torch.distributed.run ... -m pipeline_memory_worker OUT RUN_DIR...

Rank 0 writes the bytes of all tensors at the peak of a step, by run and rank. The ranks are real: torch's pipelines
exchange the shapes of what they will send.
"""

import gc
import json
import sys
from pathlib import Path

from memory import live_bytes, peak_during
from sharding_worker import Worker

from hyperpod_ft.planning.layout import Sharding
from hyperpod_ft.runs.run import Run

STEPS = 4


def measure(worker: Worker, run: Run) -> int:
    others = live_bytes()
    with worker.attempt(run, Sharding("replicated", 1), experts=1) as loop:
        loop.step(1, [])
        # what only the collector of cycles would free is freed at once, as most of it is in longer runs
        gc.set_threshold(50)
        # the least of some steps: gloo copies what it sends in threads of its own, which may let go of it late
        return min(peak_during(lambda number=step: loop.step(number, [])) for step in range(2, STEPS + 1)) - others


def main() -> None:
    out, runs = Path(sys.argv[1]), [Run.open(Path(argument)) for argument in sys.argv[2:]]
    worker = Worker(runs[0].plan.degrees.world_size)
    peaks = {run.config.name: worker.ranks.gather(run.config.name, measure(worker, run)) for run in runs}
    if worker.ranks.is_rank_0:
        out.write_text(json.dumps(peaks))


if __name__ == "__main__":
    main()
