"""TRL's SFTTrainer on packed rows of random tokens: python train_with_trl.py SETTINGS OUTPUT

SETTINGS is JSON, see benchmarks/training.py. It trains on the GPU if there is one. `fused_head` false computes the
loss from transformers' own logits, as TRL did before it fused the output matrix into the loss: on CPUs that is faster.
"""

import itertools
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainerCallback
from trl import SFTConfig, SFTTrainer

ON_GPU = torch.cuda.is_available()


class WholeLogits(SFTTrainer):
    def compute_loss(self, *args, **kwargs):
        return Trainer.compute_loss(self, *args, **kwargs)


class Clock(TrainerCallback):
    """CPU seconds of the process, and seconds, at the end of each step."""

    def __init__(self):
        self.cpu, self.wall = [], []

    def on_step_end(self, args, state, control, **kwargs):
        if ON_GPU:
            torch.cuda.synchronize()
        self.cpu.append(time.process_time())
        self.wall.append(time.perf_counter())

    on_train_begin = on_step_end


def median_difference(ends, warm_up):
    return statistics.median([after - before for before, after in itertools.pairwise(ends)][warm_up:])


def status(key):
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def main():
    settings, output = json.loads(sys.argv[1]), Path(sys.argv[2])
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts again from now
    start = status("VmRSS")
    length = settings["max_length"] // settings["documents"]
    documents = settings["rows"] * settings["steps"] * settings["documents"]
    tokens = np.random.default_rng(0).integers(3, settings["vocabulary"], (documents, length))
    # the rows are tokens already: the trainer only wants to have one
    special = {"unk_token": "<pad>", "pad_token": "<pad>", "eos_token": "</s>"}
    words = models.WordLevel({"<pad>": 0, "</s>": 1}, special["unk_token"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special)
    bf16 = settings["precision"] == "bf16"
    lora = settings["method"] == "lora"
    config = SFTConfig(
        str(output),
        packing=True,
        max_length=settings["max_length"],
        per_device_train_batch_size=settings["rows"],
        max_steps=settings["steps"],
        gradient_checkpointing=settings.get("gradient_checkpointing", False),
        use_liger_kernel=settings.get("liger", False),
        torch_compile=settings.get("compile", False),
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        bf16=bf16,
        use_cpu=not ON_GPU,
        dataloader_num_workers=0,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    clock = Clock()
    trainer = (SFTTrainer if settings["fused_head"] else WholeLogits)(
        AutoModelForCausalLM.from_pretrained(
            settings["model"],
            attn_implementation=settings.get("attention", "sdpa"),
            # as the kit: a frozen base in the dtype of the computation, trained weights in fp32
            dtype=torch.bfloat16 if bf16 and lora else torch.float32,
        ),
        config,
        train_dataset=Dataset.from_dict({"input_ids": tokens.tolist()}),
        processing_class=tokenizer,
        callbacks=[clock],
        peft_config=LoraConfig(
            r=settings["rank"],
            lora_alpha=settings["alpha"],
            target_modules=settings["target_modules"],
            task_type="CAUSAL_LM",
        )
        if lora
        else None,
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    facts = {
        "step_cpu": median_difference(clock.cpu, settings["warm_up"]),
        "step_seconds": median_difference(clock.wall, settings["warm_up"]),
        "beyond_imports": torch.cuda.max_memory_allocated() if ON_GPU else status("VmHWM") - start,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
    output.mkdir(exist_ok=True)
    (output / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main()
