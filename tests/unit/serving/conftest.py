"""A tuned run, as consolidate, merge and generate leave it, and its server as `hyperpod-ft serve` starts it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hyperpod_ft.data import prompts
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


@pytest.fixture(scope="session")
def tuned_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """LoRA on the quickstart's model; `samples.json` has the answers of stage generate."""
    run = tiny_checkpoints.run_on(
        tmp_path_factory.mktemp("tuned"),
        TINY_LLAMA,
        dataset={"format": "dolly"},
        generate={"max_new_tokens": TOKENS, "prompts": ROWS, "train_samples": 2, "validation_samples": 0},
    )
    run.freeze()
    tiny_checkpoints.add_checkpoint(run, tiny_checkpoints.trainable(tiny_checkpoints.peft_model(TINY_LLAMA)))
    consolidate.work(run)
    merge.work(run)
    stage_runs.finish(run, "merge")
    run.dataset_path.mkdir(parents=True)
    samples = [{"split": "train", "prompt": prompts.prompt(run.config.dataset, row), "completion": "?"} for row in ROWS]
    (run.dataset_path / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    (run.dataset_path / "report.json").write_text("{}")
    generate.work(run)
    return run


@dataclass
class Serving:
    """A started `hyperpod-ft serve`. `printed`: its first lines."""

    process: "subprocess.Popen[str]"
    url: str
    printed: list[str]


def serve(*arguments: str, **environment: str) -> Serving:
    """Start it on a free port, and wait until it answers."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hyperpod_ft", "serve", *arguments, "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )
    printed = []
    assert process.stdout is not None
    for line in process.stdout:
        printed.append(line.rstrip("\n"))
        if line.startswith("Stop:"):
            break
    found = re.search(r"http://\S+?(?=/$)", "\n".join(printed), re.MULTILINE)
    assert found, printed
    return Serving(process, found[0], printed)


@pytest.fixture(scope="session")
def serving(tuned_run: Run) -> Iterator[Serving]:
    """The run's server with base, tuned and the adapter by name."""
    started = serve(str(tuned_run.directory), "--adapter", f"mine={tuned_run.adapter}")
    yield started
    started.process.terminate()
    assert started.process.wait(30) == 0
