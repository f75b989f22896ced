"""TRL's preparation of rows, in its trainer: python pack_with_trl.py MODEL ROWS MAX_LENGTH OUTPUT

SFTTrainer tokenizes and packs in its constructor; the model is tiny and is not trained.
"""

import json
import sys
from pathlib import Path

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

if __name__ == "__main__":
    model, rows, max_length, output = sys.argv[1:]
    train = load_dataset("json", data_files=rows, split="train")
    chats = "messages" in train.column_names
    config = SFTConfig(
        output,
        packing=True,
        max_length=int(max_length),
        **{"assistant_only_loss" if chats else "completion_only_loss": True},
        use_cpu=True,
        bf16=False,
        report_to=[],
    )
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(model),
        config,
        train_dataset=train,
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    packed = trainer.train_dataset
    packed.save_to_disk(str(Path(output, "packed")))
    tokens = sum(len(ids) for ids in packed.with_format("numpy")["input_ids"])
    facts = {"packed_rows": len(packed), "tokens": tokens}
    Path(output, "facts.json").write_text(json.dumps(facts), encoding="utf-8")
