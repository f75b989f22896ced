"""Benchmarks time and memory of `merge` and `consolidate` against `cp -r` of the same bytes and against peers.

python -m benchmarks.checkpoints merge                                  # 8 layers, all peers
python -m benchmarks.checkpoints merge --layers 24 --peers none         # memory must not grow with the model
python -m benchmarks.checkpoints consolidate
python -m benchmarks.checkpoints consolidate --layers 24 --peers none

Writes benchmarks/results/merge.json or consolidate.json; `python -m benchmarks.table` brings them into the
documentation. Needs room for twice the model, three times with mergekit. Exits with 1 when a goal is missed.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import command, environments, rounds, tensors
from benchmarks.command import Peer
from benchmarks.goals import COPY, KIT
from benchmarks.rounds import Contender

PEERS = {
    "merge": {
        "peft": Peer("current", "merge_with_peft.py", ("peft", "transformers", "torch")),
        "axolotl": Peer("current", "merge_with_axolotl.py", ("axolotl", "peft", "transformers", "torch")),
        "mergekit": Peer("current", "merge_with_mergekit.py", ("mergekit", "peft", "transformers", "torch")),
    },
    "consolidate": {
        "optimum-neuron": Peer(
            "optimum-neuron", "consolidate_with_optimum_neuron.py", ("optimum-neuron", "transformers", "torch")
        ),
    },
}
INPUTS = {"merge": ("base", "adapter"), "consolidate": ("checkpoint-1",)}
KIT_PACKAGES = ("hyperpod-ft", "torch", "numpy", "safetensors")


def main() -> None:
    parser = command.parser("Benchmark merge or consolidate.")
    parser.add_argument("operation", choices=PEERS)
    parser.add_argument("--layers", type=int, default=8, help="0.44 GB each, plus 2.1 GB; default 8")
    options = parser.parse_args()
    operation, layers = options.operation, str(options.layers)
    peers = PEERS[operation]
    installed = command.install(options.peers, peers, options.environments, KIT_PACKAGES)
    options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.work) as name:
        directory = Path(name).resolve()
        inputs = [directory / "inputs" / what for what in INPUTS[operation]]
        for path in inputs:
            write = [sys.executable, "-m", "benchmarks.synthetic", path.name.removesuffix("-1"), str(path)]
            subprocess.run([*write, "--layers", layers], cwd=command.ROOT, check=True)
        (directory / "outputs").mkdir()
        contenders = [
            _contender(COPY, ["cp", "-r", str(inputs[0])], directory),
            _contender(KIT, _kit(operation, inputs), directory),
            *(
                _contender(
                    peer,
                    [str(python), str(environments.PEERS / peers[peer].driver), *map(str, inputs)],
                    directory,
                    is_peer=True,
                )
                for peer, python in installed.pythons.items()
            ),
        ]
        offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "home")}
        measured, failed = rounds.run(contenders, options.rounds, directory / "inputs", offline, directory / "log.txt")
        entry = {
            **command.facts(
                options.work, command.typed("benchmarks.checkpoints", options, operation, "--layers", layers), installed
            ),
            "layers": options.layers,
            "model_bytes": sum(file.stat().st_size for file in inputs[0].rglob("*") if file.is_file()),
            "contenders": measured,
            "not_measured": installed.missing | failed,
        }
    sys.exit(0 if command.record(options.results, operation, layers, entry) else 1)


def _kit(operation: str, inputs: list[Path]) -> list[str]:
    """The kit's command without the output directory, its last argument."""
    arguments = ["--base", inputs[0], "--adapter", inputs[1]] if operation == "merge" else inputs
    return [sys.executable, "-m", "hyperpod_ft", operation, *map(str, arguments), "-o"]


def _contender(name: str, arguments: list[str], directory: Path, is_peer: bool = False) -> Contender:
    """A contender whose last argument is the directory that it creates."""
    output = directory / "outputs" / name.replace(" ", "")

    def inspect() -> dict[str, Any]:
        return {"tensors": tensors.digest(output)}

    return Contender(name, [*arguments, str(output)], lambda: [output], inspect, is_peer)


if __name__ == "__main__":
    main()
