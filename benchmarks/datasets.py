"""Benchmarks dataset preparation: rows per CPU second including labels, memory, and slots that packing leaves empty.

python -m benchmarks.datasets

Each contender prepares the rows once, and then the repeated rows, so that its start-up time can be subtracted: pairs of
prompt and completion, and conversations of four turns, of which the answers are trained. The kit's stage runs alone, as
in its jobs; the kit has run the stages before it. Writes benchmarks/results/dataset.json; `python -m benchmarks.table`
adds it to the documentation. Exits with 1 when a goal is missed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import command, environments, rounds
from benchmarks.command import Installed, Peer
from benchmarks.goals import CONVERSATIONS, KIT, REPEATED, TEXT
from benchmarks.rounds import Contender

PEERS = {
    "trl 0.24": Peer("optimum-neuron", "pack_with_trl.py", ("trl", "datasets", "transformers", "tokenizers", "torch")),
    "trl 1.16": Peer("current", "pack_with_trl.py", ("trl", "datasets", "transformers", "tokenizers", "torch")),
}
KNOW_CONVERSATIONS = ("trl 1.16",)  # 0.24 is what optimum-neuron has
KIT_PACKAGES = ("hyperpod-ft", "transformers", "tokenizers", "numpy")
MAX_LENGTH = 2048


def main() -> None:
    parser = command.parser("Benchmark the preparation of a dataset.")
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines with question and answer, as GSM8K's")
    parser.add_argument("--copies", type=int, default=8, help="copies of each row in the repeated text; default 8")
    parser.add_argument("--cases", default=f"{TEXT},{CONVERSATIONS}", help="kinds of rows, separated by commas")
    options = parser.parse_args()
    installed = command.install(options.peers, PEERS, options.environments, KIT_PACKAGES)
    options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.work) as name:
        directory = Path(name).resolve()
        inputs = directory / "inputs"
        write = [sys.executable, "-m", "benchmarks.text", str(options.rows), str(options.copies), str(inputs)]
        subprocess.run(write, cwd=command.ROOT, check=True)
        alone = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "home"), "XDG_STATE_HOME": str(directory / "state")}
        met = [_case(case, options, installed, directory, alone) for case in options.cases.split(",")]
    sys.exit(0 if all(met) else 1)


def _case(
    case: str, options: argparse.Namespace, installed: Installed, directory: Path, environment: dict[str, str]
) -> bool:
    """Measure and record one kind of rows; whether it meets its goals."""
    inputs = directory / "inputs"
    contenders = []
    for form, amount in (("{}", "once"), (REPEATED, "repeated")):
        rows = inputs / f"{case}-{amount}.jsonl"
        contenders.append(_kit(form.format(KIT), directory / f"root-{case}", inputs / "model", rows, environment))
        contenders += [
            _peer(form.format(peer), python, PEERS[peer], inputs / "model", rows, directory)
            for peer, python in installed.pythons.items()
            if case == TEXT or peer in KNOW_CONVERSATIONS
        ]
    measured, failed = rounds.run(contenders, options.rounds, directory, environment, directory / f"{case}.txt")
    once = measured[KIT]["output"]
    typed = command.typed("benchmarks.datasets", options, "--cases", options.cases, "--copies", str(options.copies))
    entry = {
        **command.facts(options.work, typed, installed),
        "text": options.rows.name,
        "rows": once["rows"],
        "tokens_per_row": round(once["tokens"] / once["rows"], 1),
        "max_length": MAX_LENGTH,
        "copies": options.copies,
        "contenders": measured,
        "not_measured": installed.missing | failed,
    }
    return command.record(options.results, "dataset", case, entry)


def _kit(name: str, root: Path, model: Path, rows: Path, environment: dict[str, str]) -> Contender:
    """The stage program for a run whose earlier stages are done. Runs of one root have an environment and a model."""
    run_file = rows.with_suffix(".json")  # JSON is YAML
    run_file.write_text(json.dumps(_run(root, model, rows)), encoding="utf-8")
    script, *_ = _do(["-m", "hyperpod_ft", "render", str(run_file)], environment).splitlines()
    run = Path(script).parents[1]
    for stage in ("env", "download", "certify"):
        _do(["-m", f"hyperpod_ft.stages.{stage}", str(run)], environment)

    def outputs() -> list[Path]:
        prepared = [path for path in (root / "datasets").iterdir() if path.name != "raw"]
        return [*prepared, *(root / "records").glob("dataset-*.json")]

    def inspect() -> dict[str, Any]:
        (report,) = root.glob("datasets/*/report.json")
        facts = json.loads(report.read_text(encoding="utf-8"))
        return {"rows": facts["rows_read"], "packed_rows": facts["train_rows"], "tokens": facts["tokens"]}

    return Contender(name, [sys.executable, "-m", "hyperpod_ft.stages.dataset", str(run)], outputs, inspect)


def _do(arguments: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], env=os.environ | environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(arguments)}: {done.stdout}{done.stderr}")
    return done.stdout


def _run(root: Path, model: Path, rows: Path) -> dict[str, Any]:
    """A run file that packs all rows for training."""
    return {
        "name": "benchmark",
        "engine": "torch",
        "cluster": {"root": str(root), "instance_type": "local"},
        "parallelism": {"ranks_per_node": 1},
        "env": {"python": "current"},
        "model": {"source": str(model)},
        "dataset": {
            "source": str(rows),
            "format": "chat" if rows.name.startswith(CONVERSATIONS) else "prompt-completion",
            "max_length": MAX_LENGTH,
            "packing": "bfd",
            "validation_share": 0.0,
        },
    }


def _peer(name: str, python: Path, peer: Peer, model: Path, rows: Path, directory: Path) -> Contender:
    output = directory / "outputs" / name.replace(" ", "-")
    driver = environments.PEERS / peer.driver
    arguments = [str(python), str(driver), str(model), str(rows), str(MAX_LENGTH), str(output)]

    def inspect() -> dict[str, Any]:
        facts: dict[str, Any] = json.loads((output / "facts.json").read_text(encoding="utf-8"))
        return facts

    # its caches are in HF_HOME: if they were kept, the next round would find the work done
    return Contender(name, arguments, lambda: [output, directory / "home"], inspect, is_peer=True)


if __name__ == "__main__":
    main()
