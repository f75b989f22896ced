"""What every rank of a training runs whose last rank's copy of some parameters is another one after the first step.

    python -m torch.distributed.run ... -m diverging RUN_DIR SUFFIX

SUFFIX: how the names of those parameters end.
"""

import sys
from pathlib import Path

from hyperpod_ft.engines.neuron.loop import TrainingLoop
from hyperpod_ft.engines.ranks import join_ranks
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages.train import plan_layout, training_task


class Diverging(TrainingLoop):
    def send(self, number: int, signals: list[int]) -> object:
        sent = super().send(number, signals)
        if self.ranks.rank == self.ranks.world_size - 1:
            for name, part, _ in self.checkpoints.moments():
                if name.endswith(sys.argv[2]):
                    part.data.add_(1e-3)
        return sent


if __name__ == "__main__":
    run = Run.open(Path(sys.argv[1]))
    Diverging(training_task(run, plan_layout(run)), join_ranks(run.plan.degrees.world_size)).run_to_end()
