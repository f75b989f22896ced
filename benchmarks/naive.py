"""Benchmarks an epoch over real text: the kit's settings against those that a newcomer may write.

python -m benchmarks.naive --rows gsm8k-train.jsonl --case llama-lora
python -m benchmarks.naive --rows gsm8k-train.jsonl --case gptj-full

The naive run pads each example to a row and takes one row at a time; the other packs, and takes four. Both train on the
same examples and the same random model (4 layers of width 256): a Llama with LoRA, or all parameters of a GPT-J. They
use engine torch in one process with one thread, in fp32: what bf16 and several ranks add on accelerators is not in the
figure. Writes benchmarks/results/naive.json; `python -m benchmarks.table` adds it to the documentation. Exits with 1
when a goal is missed.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import command, rounds
from benchmarks.goals import EPOCHS, KIT, NAIVE
from benchmarks.rounds import Contender
from benchmarks.synthetic import ALPHA, RANK, Geometry, write_base
from benchmarks.training import KIT_PACKAGES, ONE_THREAD, WARM_UP

MAX_LENGTH = 1024
SETTINGS: dict[str, dict[str, Any]] = {
    KIT: {"packing": "bfd", "micro_batch_size": 4},
    NAIVE: {"packing": "none", "micro_batch_size": 1},
}


def main() -> None:
    parser = command.parser("Benchmark an epoch with good and with naive settings.")
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines with question and answer, as GSM8K's")
    parser.add_argument("--case", choices=EPOCHS, default="llama-lora", help="the model and what of it is trained")
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
            "text.prepare(Path(sys.argv[1]), 1, Path(sys.argv[2]), naive.MODELS[sys.argv[4]], int(sys.argv[3]))"
        )
        arguments = [str(options.rows), str(inputs), str(options.most), options.case]
        subprocess.run([sys.executable, "-c", write, *arguments], cwd=command.ROOT, check=True)
        contenders = [_contender(name, directory, inputs, options.case) for name in SETTINGS]
        measured, _ = rounds.run(contenders, options.rounds, inputs, ONE_THREAD, directory / "log.txt")
    entry = {
        **command.facts(
            options.work,
            command.typed("benchmarks.naive", options, "--case", options.case, "--most", str(options.most)),
            installed,
        ),
        "text": options.rows.name,
        "rows": options.most,
        "max_length": MAX_LENGTH,
        "contenders": measured,
        "not_measured": {},
    }
    sys.exit(0 if command.record(options.results, "naive", options.case, entry) else 1)


def _llama(directory: Path, vocabulary: int) -> None:
    geometry = Geometry(4, hidden=256, intermediate=688, heads=4, kv_heads=2, vocabulary=vocabulary)
    write_base(directory, geometry)


def _gptj(directory: Path, vocabulary: int) -> None:
    import torch  # noqa: PLC0415 - only the process that writes the model needs it
    from transformers import GPTJConfig, GPTJForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    sizes = {"n_embd": 256, "n_layer": 4, "n_head": 4, "rotary_dim": 32, "n_positions": MAX_LENGTH}
    no_dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    ids = {"vocab_size": vocabulary, "bos_token_id": vocabulary - 2, "eos_token_id": vocabulary - 1}
    model = GPTJForCausalLM(GPTJConfig(**sizes, **no_dropout, **ids))
    model.to(torch.bfloat16).save_pretrained(directory)


MODELS = {"llama-lora": _llama, "gptj-full": _gptj}


def _contender(name: str, directory: Path, inputs: Path, case: str) -> Contender:
    file = directory / f"{name.replace(' ', '-')}.json"
    run = _run(name, directory, inputs, case)
    program = [sys.executable, "-m", "benchmarks.training_steps", str(run), str(WARM_UP), str(file)]
    return Contender(name, program, lambda: [file], lambda: {}, figures=lambda: _figures(file))


def _figures(file: Path) -> dict[str, float]:
    figures: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
    return figures


def _run(name: str, directory: Path, inputs: Path, case: str) -> Path:
    """A run directory with everything before training done."""
    settings, method = SETTINGS[name], case.rpartition("-")[2]
    values = {
        "name": name.replace(" ", "-"),
        "engine": "torch",
        "cluster": {"root": str(directory / "root"), "instance_type": "local"},
        "parallelism": {"ranks_per_node": 1},
        "env": {"python": "current"},
        "model": {"source": str(inputs / "model")},
        "dataset": {
            "source": str(inputs / "text-once.jsonl"),
            "format": "prompt-completion",
            "max_length": MAX_LENGTH,
            "packing": settings["packing"],
            "validation_share": 0.0,
        },
        "lora": {"r": RANK, "alpha": ALPHA},
        "training": {
            "method": method,
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
    for stage in ("env", "download", "certify", "dataset"):
        subprocess.run(
            [sys.executable, "-m", f"hyperpod_ft.stages.{stage}", str(run)], check=True, stdout=subprocess.DEVNULL
        )
    return run


if __name__ == "__main__":
    main()
