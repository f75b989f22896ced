"""Benchmarks engine torch against TRL's SFTTrainer on one CPU core: tokens per CPU second and memory of the steps.

python -m benchmarks.training [CASE ...]

Both train the same random Llama (8 layers of width 512, 32,000 tokens) on the same packed rows of random tokens, in one
process with one thread, without gradient checkpointing. TRL runs as it comes, with its fused output matrix, and with
the logits of transformers instead, which is faster on CPUs; the better of the two counts. The first steps, which warm
up, do not. Writes benchmarks/results/training.json; `python -m benchmarks.table` adds it to the documentation. Exits
with 1 when a goal is missed.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import command, environments, rounds
from benchmarks.command import Peer
from benchmarks.goals import KIT
from benchmarks.rounds import Contender
from benchmarks.synthetic import ADAPTED, ALPHA, RANK, Geometry, write_base

PEERS = {
    "trl 1.16": Peer("current", "train_with_trl.py", ("trl", "transformers", "peft", "torch")),
    "trl 1.16, whole logits": Peer("current", "train_with_trl.py", ("trl", "transformers", "peft", "torch")),
}
KIT_PACKAGES = ("hyperpod-ft", "torch", "transformers", "numpy")
GEOMETRY = Geometry(layers=8, hidden=512, intermediate=1376, heads=8, kv_heads=4, vocabulary=32_000)
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
WARM_UP = 2  # steps


@dataclass(frozen=True)
class Case:
    """What is trained: rows of `max_length` tokens with `documents` equal documents, `rows` of them a step."""

    method: str
    precision: str
    max_length: int
    documents: int
    rows: int


CASES = {
    "lora-fp32-512": Case("lora", "fp32", 512, 4, 2),
    "lora-fp32-2048": Case("lora", "fp32", 2048, 8, 1),
    "lora-bf16-512": Case("lora", "bf16", 512, 4, 2),
    "lora-bf16-2048": Case("lora", "bf16", 2048, 8, 1),
    "full-fp32-512": Case("full", "fp32", 512, 4, 2),
}


def main() -> None:
    parser = command.parser("Benchmark the training step.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--steps", type=int, default=10, help=f"optimizer steps, {WARM_UP} of them to warm up")
    options = parser.parse_args()
    names = options.cases or list(CASES)
    if unknown := set(names) - set(CASES):
        parser.error(f"unknown case {', '.join(sorted(unknown))}")
    installed = command.install(options.peers, PEERS, options.environments, KIT_PACKAGES)
    options.work.mkdir(parents=True, exist_ok=True)
    # every case is measured, even after one that misses its goal
    good = [_benchmark(name, options, installed) for name in names]
    sys.exit(0 if all(good) else 1)


def _benchmark(name: str, options: Any, installed: command.Installed) -> bool:
    case = CASES[name]
    with tempfile.TemporaryDirectory(dir=options.work) as scratch:
        directory = Path(scratch).resolve()
        (directory / "outputs").mkdir()
        write_base(directory / "model", GEOMETRY)
        contenders = [_kit(directory, case, options.steps)]
        contenders += [
            _peer(peer, python, directory, case, options.steps) for peer, python in installed.pythons.items()
        ]
        environment = ONE_THREAD | {
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(directory / "home"),
            "PYTHONWARNINGS": "ignore",
        }
        measured, failed = rounds.run(
            contenders, options.rounds, directory / "model", environment, directory / "log.txt"
        )
    entry = {
        **command.facts(
            options.work,
            command.typed("benchmarks.training", options, name, "--steps", str(options.steps)),
            installed,
        ),
        **asdict(case),
        "contenders": measured,
        "not_measured": installed.missing | failed,
    }
    return command.record(options.results, "training", name, entry)


def _kit(directory: Path, case: Case, steps: int) -> Contender:
    file = directory / "outputs" / "kit.json"
    run = _run_directory(directory, case, steps)
    program = [sys.executable, "-m", "benchmarks.training_steps", str(run), str(WARM_UP), str(file)]
    return Contender(KIT, program, lambda: [file], lambda: {}, figures=lambda: _figures(file))


def _peer(name: str, python: Path, directory: Path, case: Case, steps: int) -> Contender:
    output = directory / "outputs" / name.replace(" ", "-")
    settings = asdict(case) | {
        "model": str(directory / "model"),
        "steps": steps,
        "warm_up": WARM_UP,
        "fused_head": "logits" not in name,
        "rank": RANK,
        "alpha": ALPHA,
        "target_modules": ADAPTED,
        "vocabulary": GEOMETRY.vocabulary,
    }
    driver = environments.PEERS / PEERS[name].driver
    program = [str(python), str(driver), json.dumps(settings), str(output)]
    return Contender(
        name, program, lambda: [output], lambda: {}, is_peer=True, figures=lambda: _figures(output / "facts.json")
    )


def _figures(file: Path) -> dict[str, float]:
    figures: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
    return figures


def _run_directory(directory: Path, case: Case, steps: int) -> Path:
    """A run whose model and rows are there, so that training can begin."""
    (directory / "rows.jsonl").write_text('{"text": "the rows are written below"}\n', encoding="utf-8")
    lora = {"r": RANK, "alpha": ALPHA, "target_modules": list(ADAPTED)}
    values = {
        "name": "benchmark",
        "engine": "torch",
        "cluster": {"root": str(directory / "root"), "instance_type": "local"},
        "parallelism": {"ranks_per_node": 1},
        "env": {"python": "current"},
        "model": {"source": str(directory / "model")},
        "dataset": {"source": str(directory / "rows.jsonl"), "format": "text", "max_length": case.max_length},
        "training": {
            "method": case.method,
            "precision": case.precision,
            "micro_batch_size": case.rows,
            "max_steps": steps,
            "learning_rate": 1e-4,
            "schedule": "constant",
            "warmup_share": 0,
            "sanity_steps": 0,
        },
        **({"lora": lora} if case.method == "lora" else {}),
    }
    run_file = directory / "run.json"  # JSON is YAML
    run_file.write_text(json.dumps(values), encoding="utf-8")
    for arguments in (
        ["-m", "hyperpod_ft", "render", str(run_file)],
        ["-m", "hyperpod_ft.stages.env"],
        ["-m", "hyperpod_ft.stages.download"],
    ):
        found = list((directory / "root" / "runs" / "benchmark").glob("*"))
        subprocess.run([sys.executable, *arguments, *map(str, found)], check=True, stdout=subprocess.DEVNULL)
    (run,) = (directory / "root" / "runs" / "benchmark").iterdir()
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    (fingerprint,) = (stage["fingerprint"] for stage in plan["stages"] if stage["name"] == "dataset")
    write_rows(directory / "root" / "datasets" / fingerprint / "train", case, steps)
    return run


def write_rows(directory: Path, case: Case, steps: int) -> None:
    """Random tokens in the format of a prepared dataset; all but a document's first count in the loss."""
    directory.mkdir(parents=True)
    length = case.max_length // case.documents
    shape = (case.rows * steps, case.max_length)
    input_ids = np.random.default_rng(0).integers(3, GEOMETRY.vocabulary, shape, np.int32)
    position_ids = np.broadcast_to(np.tile(np.arange(length, dtype=np.int32), case.documents), shape)
    labels = np.where(position_ids == 0, np.int32(-100), input_ids)
    for name, array in (("input_ids", input_ids), ("labels", labels), ("position_ids", position_ids)):
        np.save(directory / f"{name}.npy", array)


if __name__ == "__main__":
    main()
