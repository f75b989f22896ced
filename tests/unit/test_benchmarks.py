"""The benchmarks: what they recorded reaches the goals and is in the documents; a program and its measurements."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import goals, reliability, table, training
from benchmarks.command import RESULTS, ROOT
from benchmarks.goals import KIT
from benchmarks.soaking import outcome

MEASURE = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from benchmarks.measure import measure
log, output, program = map(Path, sys.argv[1:])
print(json.dumps(asdict(measure([sys.executable, str(program), str(output)], {}, log, lambda: [output]))))
"""
# Two at a time: each holds its memory until the other does too, and then for some samples.
HOLD = """
import sys, time
from pathlib import Path
from tests.waiting import wait_for
mine, others = map(Path, sys.argv[1:])
held = bytearray(100_000_000)
held[::4096] = b"1" * len(held[::4096])
mine.touch()
wait_for(others.exists)
time.sleep(3)
"""
WORK = f"""
import subprocess, sys, time
names = sys.argv[1] + ".a", sys.argv[1] + ".b"
children = [subprocess.Popen([sys.executable, "-c", {HOLD!r}, *order]) for order in (names, names[::-1])]
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


def test_the_dataset_benchmark_runs(tmp_path: Path) -> None:
    rows = [{"question": f"How many clips are {n} and {n}?", "answer": f"{n} + {n} = {2 * n}"} for n in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = ["--rows", tmp_path / "rows.jsonl", "--work", tmp_path / "work", "--results", tmp_path / "results"]
    few = ["--cases", "conversations", "--rounds", "1", "--copies", "20", "--peers", "none"]
    command = [sys.executable, "-m", "benchmarks.datasets", *few, *places]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    written = tmp_path / "results" / "dataset.json"
    # it exits with 1 too when such a text misses a goal
    assert written.exists() and "Traceback" not in done.stderr, done.stdout + done.stderr
    found = json.loads(written.read_text())
    entry = found["conversations"]
    assert entry["command"] == "python -m benchmarks.datasets --cases conversations --copies 20 --rounds 1 --peers none"
    assert [found["output"]["rows"] for found in entry["contenders"].values()] == [25, 500]
    assert not list((tmp_path / "work").iterdir())


def test_the_training_benchmark_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = ["lora-fp32-512", "--rounds", "1", "--steps", "3", "--peers", "none"]
    places = ["--work", tmp_path / "work", "--results", tmp_path / "results"]
    monkeypatch.setattr(sys, "argv", ["training", *map(str, [*few, *places])])
    with pytest.raises(SystemExit, match=r"^0$"):
        training.main()
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


@pytest.mark.parametrize("document", [table.PERFORMANCE, table.RELIABILITY])
def test_the_document_shows_what_was_recorded(document: Path) -> None:
    made = table.documents(table.load())[document]
    assert document.read_text(encoding="utf-8") == made, "run: python -m benchmarks.table"


def test_each_kind_of_fault_has_one_outcome() -> None:
    injected = {kind for entry in table.load()["soak"]["invocations"] for kind in entry["faults"]}
    told = Counter(kind for _, _, kinds in reliability.OUTCOMES for kind in kinds)
    assert injected <= set(told) and set(told.values()) == {1}


def test_what_was_recorded_reaches_every_goal() -> None:
    missed = {
        goal.what: goal.form.format(value) for goal, value in goals.reached(table.load()).items() if not goal.met(value)
    }
    assert missed == {}


def test_records_name_no_place_of_the_machine() -> None:
    for file in RESULTS.glob("*.json"):
        assert not re.search(r'["\s=:]/\w', file.read_text()), file


def test_the_soak_sees_what_became_different() -> None:
    expected: dict[str, Any] = {"metrics": [{"step": 1, "loss": 2.5}], "files": {"merged/a": "x"}}
    assert outcome.differences(expected, {"metrics": [{"step": 1, "loss": 2.5}], "files": {"merged/a": "x"}}) == []
    found = {"metrics": [{"step": 1, "loss": 2.25}], "files": {}}
    assert outcome.differences(expected, found) == [
        "files/merged/a: x became None",
        "metrics/0/loss: 2.5 became 2.25",
    ]
    expected["rounding"] = 1e-3  # of a run on another number of nodes
    found = {"rounding": 1e-3, "metrics": [{"step": 1, "loss": 2.501}], "files": {"merged/a": "x"}}
    assert outcome.differences(expected, found) == []
    assert len(outcome.differences(expected, found | {"metrics": [{"step": 1, "loss": 2.51}]})) == 1
