"""Benchmarks loading a base model on the ranks of a node: peak host memory against the model's bytes, and time.

python -m benchmarks.loading                # 1, 2 and 4 ranks, bf16 and fp32 in memory; bf16 on disk
python -m benchmarks.loading --peers none

The peer is transformers: `from_pretrained` on every rank, then FSDP. Memory is what a rank needs beyond its imports,
summed over the ranks. Writes benchmarks/results/loading.json; `python -m benchmarks.table` brings it into the
documentation. Needs room for the model on disk, and with the peer five times its fp32 size in memory. Exits with 1
when a goal is missed.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import command
from benchmarks.command import Installed
from benchmarks.environments import versions
from benchmarks.goals import KIT, LOADED
from benchmarks.measure import CommandError, evict
from benchmarks.synthetic import Geometry, write_base

LOADERS = {KIT: "slices", "transformers": "whole"}
TORCH_NAMES = {"bf16": "bfloat16", "fp32": "float32"}


def main() -> None:
    options = command.parser("Benchmark loading a base model.")
    options.add_argument("--layers", type=int, default=4, help="0.12 GB each in bf16, plus 0.52 GB; default 4")
    arguments = options.parse_args()
    geometry = Geometry(arguments.layers, hidden=2048, intermediate=8192, vocabulary=64000)
    contenders = [KIT] if arguments.peers == "none" else list(LOADERS)
    packages = ("hyperpod-ft", "torch", "transformers", "safetensors")
    installed = Installed({}, {}, {KIT: versions(Path(sys.executable), packages)})
    arguments.work.mkdir(parents=True, exist_ok=True)
    good = True
    with tempfile.TemporaryDirectory(dir=arguments.work) as name:
        model = Path(name) / "model"
        write_base(model, geometry, max_shard_bytes=400_000_000)
        for size in LOADED:
            ranks, dtype = int(size.split()[0]), size.split()[-1]
            measured: dict[str, list[dict[str, float]]] = {contender: [] for contender in contenders}
            for number in range(arguments.rounds):
                for contender in contenders[number % 2 :] + contenders[: number % 2]:
                    os.sync()
                    evict(model)
                    found = load(LOADERS[contender], ranks, TORCH_NAMES[dtype], model)
                    measured[contender].append(found)
                    print(f"round {number + 1}: {size}: {contender:<12} {found}", flush=True)
            entry = {
                **command.facts(
                    arguments.work,
                    command.typed("benchmarks.loading", arguments, "--layers", str(arguments.layers)),
                    installed,
                ),
                "model_bytes": geometry.nbytes * (2 if dtype == "fp32" else 1),
                "contenders": {contender: {"rounds": rounds} for contender, rounds in measured.items()},
            }
            good &= command.record(arguments.results, "loading", size, entry)
    sys.exit(0 if good else 1)


def load(loader: str, ranks: int, dtype: str, model: Path) -> dict[str, float]:
    """Load on so many ranks: seconds of the slowest, CPU seconds and bytes of memory of all. Raises CommandError."""
    with tempfile.TemporaryDirectory() as output:
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        done = subprocess.run(
            [sys.executable, "-m", *torchrun, "benchmarks.loading_ranks", loader, dtype, str(model), output],
            cwd=command.ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        found = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(Path(output).iterdir())]
    if done.returncode or len(found) != ranks:
        raise CommandError(f"exit code {done.returncode}: {done.stderr.strip()[-2000:]}")
    return {
        "wall": max(rank["wall"] for rank in found),
        "cpu": sum(rank["cpu"] for rank in found),
        "peak": sum(rank["peak"] for rank in found),
    }


if __name__ == "__main__":
    main()
