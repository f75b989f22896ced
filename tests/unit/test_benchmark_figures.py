"""Figures and goals follow from what benchmarks recorded, and the document shows them."""

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import command, goals, table
from benchmarks.command import RESULTS
from benchmarks.goals import ALONE, COPY, GOALS, KIT, REPEATED


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
