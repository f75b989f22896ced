"""What make_checkpoints.py runs with upstream alone: no module of the kit takes part.

    python -m torch.distributed.run ... -m upstream train FIXTURE BASE OUT
    python -m upstream consolidate CHECKPOINT OUT

`train` leaves optimum-neuron's checkpoints in OUT and, unless there is a pipeline, live_sharded_logits.safetensors:
`input_ids`, the logits of the sharded model after training (`trained`), for LoRA also those without adapter (`base`).
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from make_checkpoints import FIXTURES, STEPS
from neuronx_distributed.parallel_layers import parallel_state
from optimum.neuron import NeuronSFTConfig, NeuronSFTTrainer, NeuronTrainer
from optimum.neuron.models.training import NeuronModelForCausalLM
from optimum.neuron.models.training.checkpointing import consolidate_model_parallel_checkpoints_to_unified_checkpoint
from peft import LoraConfig
from safetensors.torch import save_file

from tests.unit import tiny_tokenizer

LENGTH = 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Trainer(NeuronSFTTrainer):  # type: ignore[misc]
    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        # NeuronSFTTrainer's adds an argument `use_cache`, which a pipeline's model does not take
        return NeuronTrainer.compute_loss(self, *arguments, **options)


def train(name: str, base: str, out: Path) -> None:
    fixture = FIXTURES[name]
    torch.manual_seed(0)
    settings = NeuronSFTConfig(
        output_dir=str(out),
        max_steps=STEPS,
        save_steps=STEPS,
        save_strategy="steps",
        logging_steps=1,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        learning_rate=1e-2,
        bf16=False,
        zero_1=False,
        tensor_parallel_size=fixture.tensor_parallel,
        pipeline_parallel_size=fixture.pipeline_parallel,
        disable_sequence_parallel=not fixture.sequence_parallel,
        fuse_qkv=fixture.fuse_qkv,
        use_xser=fixture.xser,
        async_save=False,
        max_length=LENGTH,
        packing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        report_to="none",
        disable_tqdm=True,
        skip_cache_push=True,
    )
    model = NeuronModelForCausalLM.from_pretrained(
        base, settings.trn_config, torch_dtype=torch.float32, attn_implementation="eager"
    )
    adapter = LoraConfig(r=4, lora_alpha=8, bias="none", task_type="CAUSAL_LM", target_modules=TARGETS)
    vocabulary = model.config.vocab_size
    rows = torch.randint(3, vocabulary, (16, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()
    trainer = Trainer(
        model=model,
        args=settings,
        processing_class=tiny_tokenizer.make(),
        peft_config=adapter if fixture.lora else None,
        train_dataset=Dataset.from_list([{"input_ids": row, "attention_mask": [1] * LENGTH} for row in rows]),
    )
    trainer.train()
    if fixture.pipeline_parallel == 1:
        ids = torch.randint(3, vocabulary, (2, LENGTH), generator=torch.Generator().manual_seed(2))
        found = {"input_ids": ids, "trained": logits(trainer.model, ids)}
        if fixture.lora:
            with trainer.model.disable_adapter():
                found["base"] = logits(trainer.model, ids)
        if dist.get_rank() == 0:
            save_file(found, out / "live_sharded_logits.safetensors")
    dist.barrier()


@torch.no_grad()
def logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """fp32 [2, LENGTH, vocabulary], from the parts of all tensor-parallel ranks."""
    part = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float().contiguous()
    parts = [torch.empty_like(part) for _ in range(parallel_state.get_tensor_model_parallel_size())]
    dist.all_gather(parts, part, group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, -1)


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
    else:
        consolidate_model_parallel_checkpoints_to_unified_checkpoint(sys.argv[2], sys.argv[3])
