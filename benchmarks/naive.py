"""Benchmarks an epoch over real text: the kit's settings against those that a newcomer may write.

python -m benchmarks.naive --rows gsm8k-train.jsonl

The naive run pads each example to a row and takes one row at a time; the other packs, and takes four. Both train LoRA
on the same examples and the same random Llama (4 layers of width 256) with engine torch, in one process with one
thread, in fp32: what bf16 adds on accelerators is not in the figure. Writes benchmarks/results/naive.json;
`python -m benchmarks.table` adds it to the documentation. Exits with 1 when a goal is missed.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import command, rounds
from benchmarks.goals import KIT, NAIVE, TEXT
from benchmarks.rounds import Contender
from benchmarks.synthetic import ADAPTED, ALPHA, RANK, Geometry
from benchmarks.training import KIT_PACKAGES, ONE_THREAD, WARM_UP

GEOMETRY = Geometry(layers=4, hidden=256, intermediate=688, heads=4, kv_heads=2)
MAX_LENGTH = 1024
SETTINGS: dict[str, dict[str, Any]] = {
    KIT: {"packing": "bfd", "micro_batch_size": 4},
    NAIVE: {"packing": "none", "micro_batch_size": 1},
}


def main() -> None:
    parser = command.parser("Benchmark an epoch with good and with naive settings.")
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines with question and answer, as GSM8K's")
    parser.add_argument("--most", type=int, default=256, help="how many rows to take; default 256")
    options = parser.parse_args()
    installed = command.install("none", {}, options.environments, KIT_PACKAGES)
    options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.work) as name:
        directory = Path(name).resolve()
        inputs = directory / "inputs"
        # in a process of its own: this one must stay small
        write = (
            "import sys; from pathlib import Path; from benchmarks import naive, text;"
            "text.prepare(Path(sys.argv[1]), 1, Path(sys.argv[2]), naive.GEOMETRY, int(sys.argv[3]))"
        )
        arguments = [str(options.rows), str(inputs), str(options.most)]
        subprocess.run([sys.executable, "-c", write, *arguments], cwd=command.ROOT, check=True)
        contenders = [_contender(name, directory, inputs) for name in SETTINGS]
        measured, _ = rounds.run(contenders, options.rounds, inputs, ONE_THREAD, directory / "log.txt")
    entry = {
        **command.facts(
            options.work, command.typed("benchmarks.naive", options, "--most", str(options.most)), installed
        ),
        "text": options.rows.name,
        "rows": options.most,
        "max_length": MAX_LENGTH,
        "contenders": measured,
        "not_measured": {},
    }
    sys.exit(0 if command.record(options.results, "naive", TEXT, entry) else 1)


def _contender(name: str, directory: Path, inputs: Path) -> Contender:
    file = directory / f"{name.replace(' ', '-')}.json"
    run = _run(name, directory, inputs)
    program = [sys.executable, "-m", "benchmarks.training_steps", str(run), str(WARM_UP), str(file)]
    return Contender(name, program, lambda: [file], lambda: {}, figures=lambda: _figures(file))


def _figures(file: Path) -> dict[str, float]:
    figures: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
    return figures


def _run(name: str, directory: Path, inputs: Path) -> Path:
    """A run directory with everything before training done."""
    settings = SETTINGS[name]
    values = {
        "name": name.replace(" ", "-"),
        "engine": "torch",
        "cluster": {"root": str(directory / "root"), "instance_type": "local"},
        "parallelism": {"ranks_per_node": 1},
        "env": {"python": "current"},
        "model": {"source": str(inputs / "model")},
        "dataset": {
            "source": str(inputs / "once.jsonl"),
            "format": "prompt-completion",
            "max_length": MAX_LENGTH,
            "packing": settings["packing"],
            "validation_share": 0.0,
        },
        "lora": {"r": RANK, "alpha": ALPHA, "target_modules": list(ADAPTED)},
        "training": {
            "precision": "fp32",
            "epochs": 1,
            "micro_batch_size": settings["micro_batch_size"],
            "sanity_steps": 0,
        },
    }
    run_file = directory / f"{values['name']}.json"  # JSON is YAML
    run_file.write_text(json.dumps(values), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "hyperpod_ft", "render", str(run_file)], check=True, capture_output=True)
    (run,) = (directory / "root" / "runs" / str(values["name"])).iterdir()
    for stage in ("env", "download", "dataset"):
        subprocess.run(
            [sys.executable, "-m", f"hyperpod_ft.stages.{stage}", str(run)], check=True, stdout=subprocess.DEVNULL
        )
    return run


if __name__ == "__main__":
    main()
