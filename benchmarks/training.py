"""Benchmarks engine torch against TRL's SFTTrainer on one CPU core: tokens per CPU second and memory of the steps.

python -m benchmarks.training [CASE ...]

Both train the same random Llama (8 layers of width 512, 32,000 tokens) on the same packed rows of random tokens, in one
process with one thread, without gradient checkpointing. TRL runs as it comes, with its fused output matrix, and with
the logits of transformers instead, which is faster on CPUs; the better of the two counts. The first steps, which warm
up, do not. The kit's processes have the allocator settings that its scripts give ranks on CPUs. Engine trl is compared
with a plain script of the same settings, in one case. Writes
benchmarks/results/training.json; `python -m benchmarks.table` adds it to the documentation. Exits with 1 when a goal is
missed.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import command, environments, rounds
from benchmarks.command import Peer
from benchmarks.goals import ENGINE_TRL, KIT, PLAIN_TRL
from benchmarks.rounds import Contender
from benchmarks.synthetic import ADAPTED, ALPHA, RANK, Geometry
from benchmarks.training_run import Case, prepare
from hyperpod_ft.launch.render import ALLOCATION_ON_CPUS

PACKAGES = ("trl", "transformers", "peft", "torch")
# further settings of each peer's driver
SETTINGS: dict[str, dict[str, Any]] = {
    "trl 1.16": {"fused_head": True},
    "trl 1.16, whole logits": {"fused_head": False},
    PLAIN_TRL: {"fused_head": True, "attention": "eager"},
}
PEERS = {name: Peer("current", "train_with_trl.py", PACKAGES) for name in SETTINGS}
KIT_PACKAGES = ("hyperpod-ft", "torch", "transformers", "numpy")
GEOMETRY = Geometry(layers=8, hidden=512, intermediate=1376, heads=8, kv_heads=4, vocabulary=32_000)
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
WARM_UP = 2  # steps

CASES = {
    "lora-fp32-512": Case("lora", "fp32", 512, 4, 2, GEOMETRY),
    "lora-fp32-2048": Case("lora", "fp32", 2048, 8, 1, GEOMETRY),
    "lora-bf16-512": Case("lora", "bf16", 512, 4, 2, GEOMETRY),
    "lora-bf16-2048": Case("lora", "bf16", 2048, 8, 1, GEOMETRY),
    "full-fp32-512": Case("full", "fp32", 512, 4, 2, GEOMETRY),
}


def main() -> None:
    options = parse_arguments("Benchmark the training step.", CASES, steps=10)
    installed = command.install(options.peers, PEERS, options.environments, KIT_PACKAGES)
    options.work.mkdir(parents=True, exist_ok=True)
    # every case is measured, even after one that misses its goal
    good = [benchmark("training", name, CASES[name], SETTINGS, options, installed) for name in options.cases]
    sys.exit(0 if all(good) else 1)


def parse_arguments(description: str, cases: Mapping[str, Case], steps: int) -> argparse.Namespace:
    """The command line of a benchmark of training; its `cases` are the names of those to measure."""
    parser = command.parser(description)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(cases)}; default: all")
    parser.add_argument("--steps", type=int, default=steps, help=f"optimizer steps, {WARM_UP} of them to warm up")
    options = parser.parse_args()
    options.cases = options.cases or list(cases)
    if unknown := set(options.cases) - set(cases):
        parser.error(f"unknown case {', '.join(sorted(unknown))}")
    return options


def benchmark(
    kind: str,
    name: str,
    case: Case,
    peers: Mapping[str, Mapping[str, Any]],
    options: argparse.Namespace,
    installed: command.Installed,
) -> bool:
    """Measure one case with the kit and the installed peers, record it, and return whether it meets its goals."""
    with tempfile.TemporaryDirectory(dir=options.work) as scratch:
        directory = Path(scratch).resolve()
        (directory / "outputs").mkdir()
        contenders = [_kit(KIT, "torch", directory, case, options.steps)]
        if PLAIN_TRL in installed.pythons:
            contenders.append(_kit(ENGINE_TRL, "trl", directory, case, options.steps))
        contenders += [
            _peer(peer, python, directory, case, options.steps, peers[peer])
            for peer, python in installed.pythons.items()
        ]
        environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "home"), "PYTHONWARNINGS": "ignore"}
        if case.instance_type == "local":
            environment |= ONE_THREAD
        measured, failed = rounds.run(
            contenders, options.rounds, directory / "model", environment, directory / "log.txt"
        )
    entry = {
        **command.facts(
            options.work,
            command.typed(f"benchmarks.{kind}", options, name, "--steps", str(options.steps)),
            installed,
        ),
        **asdict(case),
        "contenders": measured,
        "not_measured": installed.missing | failed,
    }
    return command.record(options.results, kind, name, entry)


def _kit(name: str, engine: str, directory: Path, case: Case, steps: int) -> Contender:
    file = directory / "outputs" / f"{engine}.json"
    run = prepare(directory, case, steps, {"training": {"save_only_model": True}}, name=engine, engine=engine)
    program = [sys.executable, "-m", "benchmarks.training_steps", str(run), str(WARM_UP), str(file)]
    if case.instance_type == "local":
        program = ["env", *(f"{name}={value}" for name, value in ALLOCATION_ON_CPUS.items()), *program]
    return Contender(
        name,
        program,
        lambda: [file],
        lambda: {},
        figures=lambda: _figures(file, case),
        prepare=lambda: rounds.remove([run / "checkpoints"]),  # else there is nothing left to train
    )


def _peer(name: str, python: Path, directory: Path, case: Case, steps: int, more: Mapping[str, Any]) -> Contender:
    output = directory / "outputs" / name.replace(" ", "-")
    settings = asdict(case) | {
        "model": str(directory / "model"),
        "steps": steps,
        "warm_up": WARM_UP,
        "rank": RANK,
        "alpha": ALPHA,
        "target_modules": ADAPTED,
        "vocabulary": case.geometry.vocabulary,
        **more,
    }
    driver = environments.PEERS / "train_with_trl.py"
    program = [str(python), str(driver), json.dumps(settings), str(output)]
    return Contender(
        name, program, lambda: [output], lambda: {}, is_peer=True, figures=lambda: _figures(output / "facts.json", case)
    )


def _figures(file: Path, case: Case) -> dict[str, float]:
    figures: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
    return figures | {"tokens_per_second": case.tokens / figures["step_seconds"]}


if __name__ == "__main__":
    main()
