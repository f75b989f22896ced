"""The runs of a soak: small, with every stage, and each with another way to train."""

import shlex
import shutil
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from benchmarks.command import ROOT

_COMMON: dict[str, Any] = {
    "engine": "torch",
    "env": {"python": "current"},
    "model": {"source": "example:tiny-llama"},
    "dataset": {"source": "example:qa", "format": "dolly", "max_length": 192, "validation_share": 0.05},
    "parallelism": {"ranks_per_node": 1, "tensor_parallel": 1},
    "generate": {
        "max_new_tokens": 4,
        "train_samples": 2,
        "validation_samples": 2,
        "prompts": ["What is Slurm?"],
    },
}
_TRAINING: dict[str, Any] = {
    "precision": "fp32",
    "max_steps": 24,
    "save_every_steps": 3,
    "learning_rate": 1e-3,
    "micro_batch_size": 2,
}
_SMALL_LORA = {"r": 4, "alpha": 8, "dropout": 0.1}  # dropout makes the random state matter

CASES: Mapping[str, dict[str, Any]] = {
    # a node is all there is: the cheapest start of ranks
    "lora": {"nodes": 1, "lora": _SMALL_LORA},
    "full": {"nodes": 1, "training": {"method": "full", "validate_every_steps": 6, "keep_best": True}},
    "two-nodes": {"nodes": 2, "lora": _SMALL_LORA, "training": {"async_save": True}},
    # long enough that a lost node is back before the end
    "fewer-nodes": {
        "nodes": 4,
        "cluster": {"min_nodes": 1},
        "lora": {"r": 4, "alpha": 8},
        "training": {"max_steps": 60, "micro_batch_size": 1, "gradient_accumulation_steps": 3},
    },
    "dpo": {
        "nodes": 1,
        "dataset": {"source": "example:preferences", "format": "preference", "max_length": 128},
        "lora": _SMALL_LORA,
        "training": {"objective": "dpo"},
    },
    "neuron": {
        "engine": "neuron",
        "nodes": 1,
        "instance_type": "trn1.32xlarge",
        "parallelism": {"ranks_per_node": 2, "tensor_parallel": 2},
        "lora": _SMALL_LORA,
        "training": {"max_steps": 12},
    },
}
NEURON = "neuron"

# Engine neuron's interpreter, made of the one of scripts/test-neuron.sh: there is no Neuron device whose health could
# be checked, and the stand-ins for the packages of a Neuron node are there for ranks.
_NEURON_PYTHON = """#!/bin/bash
[[ "$*" == "-m hyperpod_ft.job.health "* ]] && exit
[[ "$1" == -c ]] && export RANK=0 WORLD_SIZE=1
export PJRT_DEVICE=CPU NXD_CPU_MODE=1 TORCHINDUCTOR_COMPILE_THREADS=1 NEURON_PLATFORM_TARGET_OVERRIDE=trn1
exec {python} "$@"
"""


def run_file(case: str, root: Path, neuron_python: Path | None) -> dict[str, Any]:
    """The run file of a case; `neuron_python`: as `neuron_environment` made it."""
    values = deepcopy(dict(CASES[case]))
    cluster = {
        "root": str(root),
        "instance_type": values.pop("instance_type", "local"),
        "nodes": values.pop("nodes"),
        "max_restarts": 2,
        "cpus_per_cpu_stage": 2,
    }
    merged = {**deepcopy(_COMMON), "name": case, "cluster": cluster, "training": {**_TRAINING}}
    for section, settings in values.items():
        merged[section] = {**merged.get(section, {}), **settings} if isinstance(settings, dict) else settings
    if merged["engine"] == "neuron":
        merged["env"] = {"python": str(neuron_python)}
    return merged


def neuron_environment(directory: Path, python: Path) -> Path:
    """Make engine neuron's interpreter in `directory`, and the stand-in for its compiler beside it."""
    programs = directory / "neuron" / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    wrapper = programs / "python"
    wrapper.write_text(_NEURON_PYTHON.format(python=shlex.quote(str(python))))
    wrapper.chmod(0o755)
    shutil.copy(ROOT / "tests" / "stand_ins" / "neuron_parallel_compile", programs)
    return wrapper
