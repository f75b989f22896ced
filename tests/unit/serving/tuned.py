"""A tuned run, as consolidate, merge and generate leave it."""

import json
from pathlib import Path

from hyperpod_ft.data.text import prompts
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import consolidate, generate, merge
from tests.unit import stage_runs, tiny_checkpoints

TINY_LLAMA = Path(__file__).resolve().parents[3] / "examples" / "quickstart" / "tiny-llama"
ROWS = [
    {"instruction": "Which command submits a batch script to Slurm?", "context": ""},
    {"instruction": "Which node state lets running jobs finish?", "context": "Nodes can be idle or drained.\n"},
    {"instruction": " Which option holds a job? ", "context": ""},
]
TOKENS = 12


def make(root: Path) -> Run:
    """LoRA on the quickstart's model; `samples.json` has the answers of stage generate."""
    run = tiny_checkpoints.run_on(
        root,
        TINY_LLAMA,
        dataset={"format": "dolly"},
        generate={"max_new_tokens": TOKENS, "prompts": ROWS, "train_samples": 2, "validation_samples": 0},
    )
    run.freeze()
    tensors = tiny_checkpoints.trainable(tiny_checkpoints.peft_model(TINY_LLAMA))
    # large enough to change answers, of which the base model is sure
    tiny_checkpoints.add_checkpoint(
        run, {name: 3 * tensor if "lora_B" in name else tensor for name, tensor in tensors.items()}
    )
    consolidate.work(run)
    merge.work(run)
    stage_runs.finish(run, "merge")
    run.paths.dataset_path.mkdir(parents=True)
    samples = [{"split": "train", "prompt": prompts.prompt(run.config.dataset, row), "completion": "?"} for row in ROWS]
    (run.paths.dataset_path / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    (run.paths.dataset_path / "report.json").write_text("{}")
    generate.work(run)
    return run
