"""Figures and goals follow from what benchmarks recorded, and the document shows them."""

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import command, goals, table
from benchmarks.command import RESULTS
from benchmarks.goals import COPY, KIT, REPEATED


def measurement(wall: float, cpu: float = 1.0, peak: int = 100_000_000) -> dict[str, Any]:
    return {"wall": wall, "cpu": cpu, "peak": peak, "written": 5_000_000_000}


def checkpoints(peak: int = 100_000_000) -> dict[str, Any]:
    walls = {COPY: (10, 20, 10), KIT: (12, 22, 13), "peft": (60, 100, 80)}
    rounds = {name: [measurement(wall, peak=peak) for wall in times] for name, times in walls.items()}
    return {"model_bytes": 5_000_000_000, "contenders": {name: {"rounds": each} for name, each in rounds.items()}}


def dataset() -> dict[str, Any]:
    output = {"rows": 1000, "packed_rows": 79, "tokens": 161_000}
    found = {}
    for name, cpu in ((KIT, 0.1), ("trl 0.24", 0.8)):
        found[name] = {"output": output, "rounds": [measurement(3, 2.0), measurement(3, 2.1)]}
        found[REPEATED.format(name)] = {
            "output": output,
            "rounds": [measurement(3, 2.0 + cpu), measurement(3, 2.1 + 2 * cpu)],
        }
    return {"rows": 1000, "copies": 2, "max_length": 2048, "contenders": found}


def training() -> dict[str, Any]:
    steps = {KIT: (1.0, 2.0, 1.0), "trl": (2.0, 3.0, 1.9), "trl, whole logits": (1.5, 3.2, 2.0)}
    memory = {KIT: 1e9, "trl": 4e9, "trl, whole logits": 3e9}
    rounds = {
        name: [measurement(3) | {"step_cpu": one, "beyond_imports": memory[name]} for one in each]
        for name, each in steps.items()
    }
    return {"instance_type": "local", "contenders": {name: {"rounds": each} for name, each in rounds.items()}}


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
