"""The benchmarks: the harness measures, and each program runs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import rounds
from benchmarks.command import ROOT
from benchmarks.goals import COPY, KIT
from benchmarks.measure import CommandError
from benchmarks.rounds import Contender

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
