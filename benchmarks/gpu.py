"""Benchmarks engine torch on one H100 or H200: tokens per second, MFU and memory; needs no network.

python -m benchmarks.gpu [CASE ...]

Runs in the environment it is started in. If TRL is installed there, it is compared as it comes, with gradient
checkpointing, and without: compiled, and with Liger's kernels (flash attention 2 and 3 are not tried); and engine trl
with a plain script of its settings. Weights and
tokens are random: zeros would make the GPU 13 % too fast. Writes benchmarks/results/gpu.json, and 16 GB of weights
below `--work` for the time of an 8B case. Exits with 1 when a goal is missed.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from benchmarks import command, environments, training
from benchmarks.goals import KIT, PLAIN_TRL
from benchmarks.synthetic import Geometry
from benchmarks.training_run import Case

LLAMA_8B = Geometry(layers=32)
LLAMA_1B = Geometry(layers=16, hidden=2048, intermediate=8192, heads=32, kv_heads=8)
INSTANCE = "p5en.48xlarge"
CASES = {
    "lora-8b-4096": Case("lora", "bf16", 4096, 8, 2, LLAMA_8B, INSTANCE),
    "lora-8b-8192": Case("lora", "bf16", 8192, 16, 1, LLAMA_8B, INSTANCE),
    "full-1b-4096": Case("full", "bf16", 4096, 8, 4, LLAMA_1B, INSTANCE),
}
PEERS: dict[str, dict[str, Any]] = {
    PLAIN_TRL: {"fused_head": True, "attention": "flex_attention"},
    "trl flex compiled": {"fused_head": True, "attention": "flex_attention", "compile": True},
    "trl liger flex": {"fused_head": True, "liger": True, "attention": "flex_attention"},
    "trl liger sdpa": {"fused_head": True, "liger": True},
    "trl defaults": {"fused_head": True, "gradient_checkpointing": True},
}


def main() -> None:
    options = training.parse_arguments("Benchmark the training step on a GPU.", CASES, steps=20)
    python = Path(sys.executable)
    installed = command.Installed({}, {}, {KIT: environments.versions(python, training.KIT_PACKAGES)})
    for peer in {"all": list(PEERS), "none": []}.get(options.peers, options.peers.split(",")):
        if importlib.util.find_spec("trl"):
            installed.pythons[peer] = python
            installed.versions[peer] = environments.versions(python, training.PACKAGES)
        else:
            installed.missing[peer] = "trl is not installed here"
    options.work.mkdir(parents=True, exist_ok=True)
    good = [training.benchmark("gpu", name, CASES[name], PEERS, options, installed) for name in options.cases]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
