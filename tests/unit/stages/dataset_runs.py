"""Runs whose stage dataset is next, with the rows that it reads."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from hyperpod_ft.runs.run import Run
from tests.unit.stage_runs import finish, make_run
from tests.unit.tiny_tokenizer import make, save

TOKENIZER: Any = make()


def prepared_run(base: Path, rows: bytes | Path, **dataset: Any) -> Run:
    """A run whose env and download stages are done: tokenizer and raw file are in place."""
    base.mkdir(exist_ok=True)
    save(base / "model", TOKENIZER)
    source = rows if isinstance(rows, Path) else base / "rows.jsonl"
    if isinstance(rows, bytes):
        source.write_bytes(rows)
    values = {"source": str(source), "format": "dolly", "max_length": 64} | dataset
    run = make_run(base, str(base / "model"), values)
    shutil.copytree(base / "model", run.paths.base_model)
    run.paths.raw_dataset.mkdir(parents=True)
    shutil.copy(source, run.paths.raw_dataset)
    finish(run, "download")
    return run


def dolly(count: int) -> bytes:
    words = ["the", "quick", "brown", "fox", "how", "many", "clips"]
    generator = np.random.default_rng(count)
    rows = [
        {"instruction": f"{' '.join(generator.choice(words, 3))} {n}?", "context": "", "response": f"answer {n}"}
        for n in range(count)
    ]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)
