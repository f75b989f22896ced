"""What every rank of the tests here runs: stage train's engine, then a look at the live model.

    python -m torch.distributed.run ... -m worker RUN_DIR LOGITS

Rank 0 writes the logits of the sharded model as it was trained, [2, 32, vocabulary], for the tokens of `probe`.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from neuronx_distributed.parallel_layers import parallel_state
from probe import probe
from safetensors.torch import save_file

from hyperpod_ft.engines.neuron.loop import TrainingLoop
from hyperpod_ft.engines.ranks import join_ranks
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages.train import plan_layout, training_task


def main() -> None:
    run, out = Run.open(Path(sys.argv[1])), Path(sys.argv[2])
    ranks = join_ranks(run.plan.degrees.world_size)
    training = TrainingLoop(training_task(run, plan_layout(run)), ranks)
    training.run_to_end()
    if run.plan.degrees.pipeline_parallel == 1:
        model = training.trainer.model.eval()
        with torch.no_grad():
            part = model(input_ids=probe(model.config.vocab_size)).logits.float().contiguous()
        group = parallel_state.get_tensor_model_parallel_group()
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part, group=group)
        if ranks.is_rank_0:
            save_file({"logits": torch.cat(parts, -1)}, out)


if __name__ == "__main__":
    main()
