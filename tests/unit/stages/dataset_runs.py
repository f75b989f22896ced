"""Runs whose stage dataset is next, with the rows that it reads."""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hyperpod_ft.runs.run import Run
from tests.unit.stage_runs import finish, make_run
from tests.unit.tiny_tokenizer import make, save

TOKENIZER: Any = make()
Rows = Iterable[Mapping[str, Any]]


def prepared_run(base: Path, rows: bytes | Path, **dataset: Any) -> Run:
    """A run whose env and download stages are done: tokenizer and raw file are in place."""
    base.mkdir(exist_ok=True)
    source = rows if isinstance(rows, Path) else base / "rows.jsonl"
    if isinstance(rows, bytes):
        source.write_bytes(rows)
    return downloaded_run(base, **{"source": str(source), "format": "dolly", "max_length": 64} | dataset)


def mixed_run(
    base: Path,
    sources: Mapping[str, tuple[str, Rows, Mapping[str, Any]]],
    more: Mapping[str, Any] = {},
    **dataset: Any,
) -> Run:
    """The same for several sources, by name their format, their rows and their own keys; `more` sections.

    Those whose keys have `validates` are sources for validation alone.
    """
    base.mkdir(exist_ok=True)
    listed: dict[str, list[dict[str, Any]]] = {"sources": [], "validation_source": []}
    for name, (format_name, rows, keys) in sources.items():
        path = base / f"{name}.jsonl"
        path.write_bytes(json_lines(rows))
        key = "validation_source" if keys.get("validates") else "sources"
        own = {other: value for other, value in keys.items() if other != "validates"}
        listed[key].append({"source": str(path), "format": format_name, **own})
    return downloaded_run(base, more, **{"max_length": 256, **listed} | dataset)


def downloaded_run(base: Path, more: Mapping[str, Any] = {}, **dataset: Any) -> Run:
    """A run with this section, whose local files are in place."""
    save(base / "model", TOKENIZER)
    run = make_run(base, str(base / "model"), dataset, more=more)
    shutil.copytree(base / "model", run.paths.base_model)
    for part, directory in zip(run.config.dataset.parts, run.paths.raw_datasets, strict=True):
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copy(part.dataset.source, directory)
    finish(run, "download")
    finish(run, "certify")
    return run


def json_lines(rows: Rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def dolly(count: int) -> bytes:
    words = ["the", "quick", "brown", "fox", "how", "many", "clips"]
    generator = np.random.default_rng(count)
    rows = [
        {"instruction": f"{' '.join(generator.choice(words, 3))} {n}?", "context": "", "response": f"answer {n}"}
        for n in range(count)
    ]
    return json_lines(rows)
