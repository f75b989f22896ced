"""A tiny T5 learns to swap two words, and with LoRA on that model to repeat one: every stage, on plain processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hyperpod_ft.checkpoint.verify.verify import verify
from hyperpod_ft.config import run_file
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import consolidate, dataset, download, stage
from tests.training.conftest import train_here
from tests.unit import tiny_t5
from tests.unit.stage_runs import finish

pytestmark = [pytest.mark.training, pytest.mark.timeout(600)]

WORDS = ["red", "blue", "green", "dog", "cat", "bird", "seven", "nine", "four"]
PAIRS = [(one, other) for one in WORDS for other in WORDS if one != other]


def settings(directory: Path, name: str, model: Path, rows: list[dict[str, str]], **changes: Any) -> dict[str, Any]:
    data = directory / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    training = {"precision": "fp32", "micro_batch_size": 4, "warmup_share": 0.05, "schedule": "constant"}
    return {
        "name": name,
        "engine": "torch",
        "cluster": {"root": str(directory / "root"), "instance_type": "local"},
        "env": {"python": "current"},
        "model": {"source": str(model)},
        "dataset": {
            "source": str(data),
            "format": "prompt-completion",
            "max_length": 64,
            "max_target_length": 48,
            "validation_share": 0.1,
        },
        "training": training | changes.pop("training"),
        "parallelism": {"ranks_per_node": 1},
    } | changes


def test_tuned_twice(tmp_path: Path) -> None:
    swapped = [{"prompt": f"swap {one} {other}", "completion": f"{other} {one}"} for one, other in PAIRS]
    base = tiny_t5.save(tmp_path / "base", [f"{row['prompt']} say {row['completion']}" for row in swapped])
    training = {"method": "full", "epochs": 40, "learning_rate": 3e-3}
    run = Run.of(
        run_file.resolve(run_file.validate(settings(tmp_path, "swap", base, swapped, training=training), ""), tmp_path)
    )
    run.freeze()
    finish(run, "env")
    stage.perform(run, "download", download.work)
    stage.perform(run, "dataset", dataset.work)
    facts = train_here(run).facts
    assert facts["final_loss"] < 0.2
    stage.perform(run, "consolidate", consolidate.work)
    assert verify(run.tuned_model).findings == ()

    repeated = [{"prompt": f"say {one} {other}", "completion": f"{other} {other}"} for one, other in PAIRS]
    training = {"method": "lora", "epochs": 16, "learning_rate": 5e-3, "schedule": "cosine"}
    lora = {"r": 8, "alpha": 16, "target_modules": ["q", "k", "v", "o", "wi_0", "wi_1", "wo"]}
    generate = {"max_new_tokens": 12, "prompts": ["say red dog", {"prompt": "say cat four"}]}
    values = settings(tmp_path, "say", run.tuned_model, repeated, training=training, lora=lora, generate=generate)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    done = subprocess.run(
        [sys.executable, "-m", "hyperpod_ft", "submit", "run.yaml", "--launcher", "process", "--watch"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    directory = next(tmp_path.glob("root/runs/say/*"))
    logs = "".join(path.read_text() for path in directory.glob("logs/*.out"))
    assert done.returncode == 0, done.stdout + logs
    assert "of sources" in logs and "of targets" in logs, "what dataset says about packing"
    found = json.loads((directory / "samples.json").read_text())
    exact = found["exact_match"]["train"]
    assert exact["base"] == 0 and exact["tuned"] >= 6, exact
    assert [row["tuned"] for row in found["prompts"]] == ["dog dog", "four four"]
    # the loss of packed rows in training is that of padded pairs in transformers
    trained = json.loads((directory / "records" / "train.json").read_text())["facts"]
    assert trained["validation_loss"] == pytest.approx(found["validation_loss"]["tuned"]["mean"], rel=1e-4)
    adapter = json.loads((directory / "adapter" / "adapter_config.json").read_text())
    assert adapter["task_type"] == "SEQ_2_SEQ_LM"
    verified = verify(directory / "merged", adapter=directory / "adapter", base=run.tuned_model)
    assert verified.findings == () and verified.logits is not None
