"""Benchmarks a step of direct preference optimization against one of supervised fine-tuning on the same rows.

python -m benchmarks.preferences

Both train the same random Llama (8 layers of width 512, 32,000 tokens) with LoRA in fp32 on one row of 512 tokens, with
one thread. The reference log-probabilities are measured before the steps, and not counted. Prints medians of CPU
seconds.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.training import GEOMETRY, ONE_THREAD, WARM_UP
from benchmarks.training_run import Case, prepare

STEPS = 7
SETTINGS: dict[str, dict[str, dict[str, str]]] = {
    "sft": {},
    "dpo": {"dataset": {"format": "preference"}, "training": {"objective": "dpo"}},
}


def step_cpu(directory: Path, objective: str, documents: int) -> float:
    """The median CPU seconds of a step on one row of that many documents, for DPO chosen and rejected ones in turn."""
    run = prepare(directory, Case("lora", "fp32", 512, documents, 1, GEOMETRY), STEPS, SETTINGS[objective])
    output = directory / "facts.json"
    steps = [sys.executable, "-m", "benchmarks.training_steps", str(run), str(WARM_UP), str(output)]
    subprocess.run(steps, env=os.environ | ONE_THREAD, check=True)
    return float(json.loads(output.read_text(encoding="utf-8"))["step_cpu"])


def main() -> None:
    for documents in (2, 32):
        found = {}
        for objective in SETTINGS:
            with tempfile.TemporaryDirectory() as directory:
                found[objective] = step_cpu(Path(directory), objective, documents)
        ratio = found["dpo"] / found["sft"]
        print(f"{documents} documents a row: {found} CPU seconds a step, {ratio:.2f}x", flush=True)


if __name__ == "__main__":
    main()
