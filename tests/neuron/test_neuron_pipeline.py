"""The flagship recipe from nothing to answers, through its rendered scripts: tiny Llama, TP 4 with 2 KV heads.

Genuine: the commands, scripts, stages, upstream's trainer. Stand-ins: a CPU process for each NeuronCore (conftest.py),
`neuron_parallel_compile`, which compiles nothing, AWS's packages for stage env, and the node's health, which would miss
the devices.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.neuron.conftest import ON_CPU, PYTHON

pytestmark = pytest.mark.neuron

REPOSITORY = Path(__file__).resolve().parents[2]
INTERPRETER = """#!/bin/bash
if [[ "$*" == "-m hyperpod_ft.job.health "* ]]; then echo "stand-in: nodes are not looked at"; exit; fi
# stage env tries to import AWS's packages
if [[ "$1" == -c ]]; then export PYTHONPATH={modules}:$PYTHONPATH; fi
{exports}
exec {python} "$@"
"""


def environment(directory: Path) -> Path:
    programs, modules = directory / "bin", directory / "modules"
    programs.mkdir(parents=True)
    modules.mkdir()
    for name in ("neuronxcc", "libneuronxla", "torch_neuronx", "neuronx_distributed"):
        (modules / f"{name}.py").touch()
    interpreter = programs / "python"
    exports = "\n".join(f"export {name}={value}" for name, value in ON_CPU.items())
    interpreter.write_text(INTERPRETER.format(exports=exports, python=PYTHON, modules=modules))
    interpreter.chmod(0o755)
    shutil.copy(REPOSITORY / "tests" / "stand_ins" / "neuron_parallel_compile", programs)
    return interpreter


def test_the_flagship_recipe_trains_a_tiny_llama(tmp_path: Path) -> None:
    settings = {
        "cluster.root": tmp_path / "root",
        "env.python": environment(tmp_path / "venv"),
        "parallelism.ranks_per_node": 8,
        "parallelism.tensor_parallel": 4,  # the tiny model has four heads
        "model.source": "example:tiny-llama",
        "model.revision": "null",
        "dataset.source": "example:qa",
        "dataset.revision": "null",
        "dataset.files": "[qa.jsonl]",
        "dataset.max_length": 256,
        "training.max_steps": 30,
        "training.learning_rate": 5e-3,
        "training.save_every_steps": 10,
        "neuron.precompile_steps": 2,
        "generate.prompts": "[]",
        "generate.max_new_tokens": 24,
    }
    overrides = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "hyperpod_ft"]
    done = subprocess.run(
        [*command, "submit", "llama3-8b-dolly-lora-trn1", *overrides, "--launcher", "process", "--watch"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
        check=False,
    )
    logs = "".join(path.read_text() for path in (tmp_path / "root").glob("runs/*/*/logs/*.out"))
    print(logs)
    assert done.returncode == 0, done.stdout + logs
    (directory,) = (tmp_path / "root" / "runs").glob("*/*")
    record = json.loads((directory / "records" / "train.json").read_text())
    assert record["facts"]["steps"] == 30 and record["facts"]["final_loss"] < record["facts"]["first_loss"]
    assert (record["facts"]["tensor_parallel"], record["facts"]["graphs_compiled"]) == (4, 0)
    assert (directory / "merged" / "model.safetensors").is_file()
    samples = json.loads((directory / "samples.json").read_text())
    assert samples
