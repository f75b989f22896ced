"""The benchmarks: that their models are what they say, that the harness measures, and that the document is right."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks import command, goals, rounds, table, tensors, text
from benchmarks.command import RESULTS, ROOT
from benchmarks.goals import ALONE, COPY, GOALS, KIT, REPEATED
from benchmarks.measure import CommandError
from benchmarks.neuron_checkpoint import write_checkpoint
from benchmarks.rounds import Contender
from benchmarks.synthetic import ADAPTED, Geometry, Weights, bfloat16, write_adapter, write_base

TINY = Geometry(layers=2, hidden=64, intermediate=192, heads=16, kv_heads=8, vocabulary=512)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("synthetic") / "base"
    write_base(directory, TINY, max_shard_bytes=100_000)
    return directory


def loaded(directory: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(directory.glob("*.safetensors")) for name, value in load_file(file).items()}


# Synthetic models


def test_the_geometry_is_that_of_llama_3_8b() -> None:
    assert Geometry(layers=32).nbytes == 2 * 8_030_261_248
    assert Geometry().nbytes == pytest.approx(5.6e9, rel=0.01)


def test_bfloat16_rounds_as_torch() -> None:
    values = np.random.default_rng(0).standard_normal(10_000, np.float32)
    values[:3] = np.array([1 + 2**-8, 1 + 3 * 2**-8, -0.0], np.float32)  # ties, and a signed zero
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(bfloat16(values), expected)


def test_the_base_is_a_model_in_several_files(base: Path) -> None:
    index = json.loads((base / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    weights = loaded(base)
    assert {name: tuple(value.shape) for name, value in weights.items()} == TINY.tensors()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in weights.values()) == TINY.nbytes
    matrices = [value.float() for name, value in weights.items() if "norm" not in name]
    assert all(value.std().item() == pytest.approx(0.02, rel=0.1) for value in matrices)
    assert len({value[0].sum().item() for value in matrices}) == len(matrices), "no two tensors are alike"
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


def test_a_part_of_a_tensor_is_the_same_as_in_the_whole() -> None:
    weights = Weights(replace(TINY, vocabulary=300_000))  # longer than the pool, so that it wraps
    name = "lm_head.weight"
    whole = np.concatenate(list(weights.blocks(name))).reshape(weights.shapes[name])
    assert np.array_equal(weights.rows(name, 260_000, 270_000), whole[260_000:270_000])


def test_the_adapter_changes_most_weights(base: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", TINY)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    merged = PeftModel.from_pretrained(model, tmp_path / "adapter").merge_and_unload().state_dict()
    for name, before in loaded(base).items():
        changed = (merged[name] != before).float().mean().item()
        adapted = name.split(".")[-2] in ADAPTED
        assert changed > 0.5 if adapted else changed == 0, (name, changed)


class TensorReference:
    """Where the loader of a checkpoint looks for torch_xla's."""


def test_the_shards_join_to_the_base(base: Path, tmp_path: Path) -> None:
    ranks = 4
    write_checkpoint(tmp_path / "checkpoint-1", TINY, ranks)
    shards = tmp_path / "checkpoint-1" / "shards"
    metadata = json.loads((shards / "mp_metadata_pp_rank_0.json").read_text())
    parts: dict[str, list[torch.Tensor]] = {}
    allowed = [(TensorReference, "torch_xla.utils.serialization.TensorReference")]
    for rank in range(ranks):
        file = shards / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt"
        with torch.serialization.safe_globals(allowed):
            references = torch.load(file, weights_only=True)
        for name, reference in references.items():
            tensor = torch.load(Path(f"{file}.tensors") / f"tensor_{reference.tid}.pt", weights_only=True)
            parts.setdefault(name, []).append(tensor)
    assert parts.keys() == metadata["parameters"].keys()
    joined = {}
    for name, pieces in parts.items():
        placement = metadata["parameters"][name]
        if not placement["tensor_model_parallel"]:
            assert all(torch.equal(piece, pieces[0]) for piece in pieces)
            joined[name] = pieces[0]
        elif placement["partition_stride"] == 2:
            for number, half in enumerate(("gate_proj", "up_proj")):
                halves = [piece.chunk(2)[number] for piece in pieces]
                joined[name.replace("gate_up_proj", half)] = torch.cat(halves)
        else:
            joined[name] = torch.cat(pieces, placement["partition_dim"])
    expected = loaded(base)
    assert joined.keys() == expected.keys()
    assert all(torch.equal(joined[name], expected[name]) for name in expected)
    assert (shards / "done").exists()


def test_the_digest_is_of_tensors_not_of_files(base: Path, tmp_path: Path) -> None:
    write_base(tmp_path / "one-file", TINY)
    assert tensors.digest(tmp_path / "one-file") == tensors.digest(base)
    (file,) = (tmp_path / "one-file").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert tensors.digest(tmp_path / "one-file") != tensors.digest(base)


def test_the_tokenizer_has_ids_in_the_order_of_merges() -> None:
    tokenizer = text.learn(["the quick brown fox, 1234 clips"] * 10)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    merged = [tokenizer.convert_tokens_to_ids("".join(pair)) for pair in backend["model"]["merges"]]
    assert merged == list(range(256, 256 + len(merged)))
    assert tokenizer("the fox")["input_ids"][0] == tokenizer.bos_token_id == len(tokenizer) - 2


# The harness

MEASURE = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from benchmarks.measure import measure
log, output, program = map(Path, sys.argv[1:])
print(json.dumps(asdict(measure([sys.executable, str(program), str(output)], {}, log, lambda: [output]))))
"""
HOLD = """
import sys, time
held = bytearray(100_000_000)
held[::4096] = b"1" * len(held[::4096])
time.sleep(0.5)
"""
WORK = f"""
import subprocess, sys, time
children = [subprocess.Popen([sys.executable, "-c", {HOLD!r}]) for _ in range(2)]
end = time.process_time() + 0.3
while time.process_time() < end: pass
assert not any(child.wait() for child in children)
open(sys.argv[1], "wb").write(bytes(8_000_000))
"""


def test_measure_counts_the_whole_tree(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(WORK)
    places = [tmp_path / "log", tmp_path / "output", tmp_path / "program.py"]
    # from a small process, as the benchmarks are: a child begins with its parent's memory
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *places], cwd=ROOT, capture_output=True, text=True, check=True
    )
    measured = json.loads(done.stdout)
    assert measured["wall"] > 0.5
    assert measured["cpu"] > 0.3
    assert 200e6 < measured["peak"] < 300e6, "two children of 100 MB each"
    assert measured["written"] == 0 or measured["written"] >= 8e6, "nothing is written to storage on tmpfs"


def contender(name: str, program: str, directory: Path, **more: Any) -> Contender:
    output = directory / name
    return Contender(
        name,
        [sys.executable, "-c", program, str(output)],
        lambda: [output],
        lambda: {"size": output.stat().st_size},
        **more,
    )


def test_rounds_rotate_and_leave_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    (inputs / "file").write_bytes(b"x" * 1000)
    write = "import sys; open(sys.argv[1], 'x').write('abc')"
    fail = "raise SystemExit('no such thing')"
    peers = [contender(COPY, write, tmp_path), contender(KIT, write, tmp_path)]
    broken = contender("peer", fail, tmp_path, is_peer=True)
    measured, failed = rounds.run([*peers, broken], 3, inputs, {}, tmp_path / "log")
    assert failed == {"peer": "exit code 1: no such thing"}
    assert {name: (len(found["rounds"]), found["output"]) for name, found in measured.items()} == {
        COPY: (3, {"size": 3}),
        KIT: (3, {"size": 3}),
    }
    order = [
        line.split("round ")[1][:1] + line.split(": ")[1].split()[0] for line in capsys.readouterr().out.splitlines()
    ]
    assert order == ["1cp", "1hyperpod-ft", "1peer", "2hyperpod-ft", "2cp", "3cp", "3hyperpod-ft"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inputs", "log"]
    with pytest.raises(CommandError, match="no such thing"):
        rounds.run([contender(KIT, fail, tmp_path)], 1, inputs, {}, tmp_path / "log")


def test_the_dataset_benchmark_runs(tmp_path: Path) -> None:
    rows = [{"question": f"How many clips are {n} and {n}?", "answer": f"{n} + {n} = {2 * n}"} for n in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = ["--rows", tmp_path / "rows.jsonl", "--work", tmp_path / "work", "--results", tmp_path / "results"]
    few = ["--rounds", "1", "--copies", "20", "--peers", "none"]
    command = [sys.executable, "-m", "benchmarks.datasets", *few, *places]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    written = tmp_path / "results" / "dataset.json"
    assert written.exists(), done.stdout + done.stderr  # it exits with 1 too when such a text misses a goal
    entry = json.loads(written.read_text())["text"]
    assert entry["command"] == "python -m benchmarks.datasets --copies 20 --rounds 1 --peers none"
    assert [found["output"]["rows"] for found in entry["contenders"].values()] == [100, 2000]
    assert not list((tmp_path / "work").iterdir())


def test_the_training_benchmark_runs(tmp_path: Path) -> None:
    few = ["lora-fp32-512", "--rounds", "1", "--steps", "3", "--peers", "none"]
    places = ["--work", tmp_path / "work", "--results", tmp_path / "results"]
    command = [sys.executable, "-m", "benchmarks.training", *few, *places]
    subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    entry = json.loads((tmp_path / "results" / "training.json").read_text())["lora-fp32-512"]
    (found,) = entry["contenders"][KIT]["rounds"]
    assert 0 < found["step_cpu"] < found["cpu"]
    assert 300e6 < found["beyond_imports"] < found["peak"], "the weights alone are 226 MB"
    assert abs(found["first_loss"] - np.log(32_000)) < 0.5
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.parametrize("verb", ["push", "pull"])
def test_the_s3_benchmark_runs(verb: str, tmp_path: Path) -> None:
    few = [verb, "--rounds", "1", "--mib", "9", "--peers", "none"]
    places = ["--work", tmp_path / "work", "--results", tmp_path / "results"]
    command = [sys.executable, "-m", "benchmarks.s3", *few, *places]
    subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    entry = json.loads((tmp_path / "results" / "s3.json").read_text())[verb]
    assert entry["tree_bytes"] == 8 * (9 << 20) + 200 * (64 << 10)
    assert list(entry["contenders"]) == [KIT]
    assert not list((tmp_path / "work").iterdir())


# Figures and the document


def measurement(wall: float, cpu: float = 1.0, peak: int = 100_000_000) -> dict[str, Any]:
    return {"wall": wall, "cpu": cpu, "peak": peak, "written": 5_000_000_000}


MACHINE = {
    "date": "2026-01-02",
    "cpu": "A CPU",
    "cores": 2,
    "memory_gb": 24.0,
    "kernel": "6.1",
    "file_system": "ext4",
    "python": "3.11.7",
}
HOW = {"command": "python -m benchmarks.x", "machine": MACHINE, "versions": {KIT: {"torch": "2"}}}


def checkpoints(peak: int = 100_000_000) -> dict[str, Any]:
    walls = {COPY: (10, 20, 10), KIT: (12, 22, 13), "peft": (60, 100, 80)}
    return {
        **HOW,
        "model_bytes": 5_000_000_000,
        "contenders": {
            name: {
                "output": {"tensors": "one" if name == "peft" else name},
                "rounds": [measurement(wall, peak=peak) for wall in times],
            }
            for name, times in walls.items()
        },
        "not_measured": {"mergekit": "cannot be installed"},
    }


def dataset() -> dict[str, Any]:
    output = {"rows": 1000, "packed_rows": 79, "tokens": 161_000}
    found = {}
    for name, cpu in ((KIT, 0.1), ("trl 0.24", 0.8)):
        found[name] = {"output": output, "rounds": [measurement(3, 2.0), measurement(3, 2.1)]}
        found[REPEATED.format(name)] = {
            "output": output,
            "rounds": [measurement(3, 2.0 + cpu), measurement(3, 2.1 + 2 * cpu)],
        }
    return {
        **HOW,
        "rows": 1000,
        "tokens_per_row": 161.0,
        "copies": 2,
        "max_length": 2048,
        "contenders": found,
        "not_measured": {},
    }


def training() -> dict[str, Any]:
    steps = {KIT: (1.0, 2.0, 1.0), "trl": (2.0, 3.0, 1.9), "trl, whole logits": (1.5, 3.2, 2.0)}
    memory = {KIT: 1e9, "trl": 4e9, "trl, whole logits": 3e9}
    return {
        **HOW,
        "method": "lora",
        "precision": "fp32",
        "max_length": 2048,
        "documents": 8,
        "rows": 1,
        "instance_type": "local",
        "contenders": {
            name: {
                "output": {},
                "rounds": [
                    measurement(3) | {"step_cpu": one, "beyond_imports": memory[name], "last_loss": 10.5}
                    for one in each
                ],
            }
            for name, each in steps.items()
        },
        "not_measured": {},
    }


def layouts() -> dict[str, Any]:
    seconds = {ALONE: (1.0, 2.0, 1.0), "TP 2": (1.2, 2.2, 1.4)}
    contenders = {
        name: {"ranks": 1 + (name != ALONE), "rounds": [{"cpu": one, "sent": 2_500_000} for one in each]}
        for name, each in seconds.items()
    }
    sent = {"PP": {"1": 0, "8": 1_040_000}}
    return {"steps": {**HOW, "contenders": contenders}, "scaling": {**HOW, "sent": sent}}


def pipelines() -> dict[str, Any]:
    case = {"ranks": 2, "micro_batches": 4, "schedule": "gpipe", "formula": 0.2, "idle": 0.23, "uneven": 1.056}
    return {"idle": {**HOW, "cases": [case]}}


def test_figures() -> None:
    results = {
        "merge": {"8": checkpoints(), "24": checkpoints(120_000_000)},
        "dataset": {"text": dataset()},
        "training": {"lora-fp32-2048": training()},
    }
    reached = {goal.what: (value, goal.met(value)) for goal, value in goals.reached(results).items()}
    assert reached["merge, 8 layers, wall against `cp -r`"] == (1.2, True), (
        "the median of ratios, not the ratio of medians"
    )
    assert reached["merge, peak memory, 24 layers against 8"] == (pytest.approx(1.2), False)
    assert reached["merge, CPU seconds per GB"] == (pytest.approx(0.2), True)
    assert reached["dataset, rows per CPU second"] == (pytest.approx(7500), True)
    assert reached["dataset, unfilled slots of best-fit packing"] == (pytest.approx(0.4895, abs=1e-4), False)
    assert not [what for what in reached if what.startswith("consolidate")]
    # in each round over the faster peer of that round: 1.5, 1.5, 1.9
    assert reached["LoRA, fp32, rows of 2048, tokens per CPU second over TRL's"] == (pytest.approx(1.5), False)
    memory = "LoRA, fp32, rows of 2048, peak memory beyond the imports over TRL's"
    assert reached[memory] == (pytest.approx(1 / 3), True), "over the peer that needs least"


def test_a_figure_without_a_limit_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    walls = {goals.KIT: 2.0, goals.S5CMD: 1.0}
    entry = {"contenders": {name: {"rounds": [{"wall": wall}]} for name, wall in walls.items()}}
    assert command.record(tmp_path, "s3", "pull", entry)
    assert "0.50x (no limit)" in capsys.readouterr().out


def test_tables() -> None:
    made = table.document("before\n" + table.BEGIN + "\nold\n" + table.END + "\nafter\n", {})
    assert made.startswith("before\n")
    assert made.endswith("\nafter\n")
    assert "old" not in made
    assert made.count("not measured") == len(GOALS)
    made = table.document(
        made,
        {
            "merge": {"8": checkpoints()},
            "dataset": {"text": dataset()},
            "training": {"lora-fp32-2048": training()},
            "layouts": layouts(),
            "pipeline": pipelines(),
        },
    )
    assert "| TP 2 | 2 | 1.20x (1.10x–1.40x) | 2.50 |" in made
    assert "|  | 1 rank | 8 ranks |\n|---|---|---|\n| PP | 0.00 | 1.04 |" in made
    assert "| 2 | 4 | `gpipe` | 20.0 % | 23.0 % | 1.06 |" in made
    assert "| hyperpod-ft | 2,048 | 1.50x (1.50x–1.90x) | 1,000 MB | 10.5000 |" in made
    assert "| merge, 8 layers, wall against `cp -r` | 1.50x | 1.15x | 1.20x (1.10x–1.30x) |" in made
    assert "| hyperpod-ft | 13.0 s | 1.20x (1.10x–1.30x) | 0.20 | 100 MB | 5.0 GB |  |" in made
    assert "| peft | 80.0 s | 6.00x (5.00x–8.00x) | 0.20 | 100 MB | 5.0 GB | no |" in made
    assert "| mergekit | not measured: cannot be installed | | | | | |" in made
    assert "| trl 0.24 | 938 (625–1,250) | 8.0x (8.0x–8.0x) | 2.0 s | 100 MB | 0.49 % |" in made
    assert "A CPU, 2 cores" in made


def test_the_document_shows_what_was_recorded() -> None:
    document = table.DOCUMENT.read_text(encoding="utf-8")
    assert document == table.document(document, table.load()), "run: python -m benchmarks.table"


def test_what_was_recorded_reaches_every_goal() -> None:
    missed = {
        goal.what: goal.form.format(value) for goal, value in goals.reached(table.load()).items() if not goal.met(value)
    }
    assert missed == {}


def test_records_name_no_place_of_the_machine() -> None:
    for file in RESULTS.glob("*.json"):
        assert not re.search(r'["\s=:]/\w', file.read_text()), file
