"""Runs for the benchmarks of training: a random Llama and packed rows of random tokens, ready to train."""

import contextlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from benchmarks.synthetic import ADAPTED, ALPHA, RANK, Geometry, write_base
from hyperpod_ft.config import run_file
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import certify, download, env, stage


@dataclass(frozen=True)
class Case:
    """What is trained: rows of `max_length` tokens with `documents` equal documents, `rows` of them a step."""

    method: str
    precision: str
    max_length: int
    documents: int
    rows: int
    geometry: Geometry
    instance_type: str = "local"

    @property
    def tokens(self) -> int:
        """Tokens of an optimizer step."""
        return self.rows * self.max_length


def prepare(
    directory: Path,
    case: Case,
    steps: int,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    name: str = "benchmark",
    engine: str = "torch",
) -> Path:
    """Write `directory`/model and a run of one rank whose model and rows are there; returns the run's directory.

    `changes`: other settings of the run file, by section. Runs in one directory share the model and the rows: `case`
    and `steps` must be the same, and the `name` another, since a run is the same under another sharding.
    """
    if not (directory / "model").exists():
        write_base(directory / "model", case.geometry)
        # the rows are tokens already: TRL only wants to have one
        words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1}, "<pad>"))
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>").save_pretrained(  # noqa: S106
            directory / "model"
        )
    (directory / "rows.jsonl").write_text('{"text": "the rows are written below"}\n', encoding="utf-8")
    lora = {"r": RANK, "alpha": ALPHA, "target_modules": list(ADAPTED)}
    values: dict[str, Any] = {
        "name": name,
        "engine": engine,
        "cluster": {"root": str(directory / "root"), "instance_type": case.instance_type},
        "parallelism": {"ranks_per_node": 1},
        "env": {"python": "current"},
        "model": {"source": str(directory / "model")},
        "dataset": {
            "source": str(directory / "rows.jsonl"),
            "format": "text",
            "max_length": case.max_length,
        },
        "training": {
            "method": case.method,
            "precision": case.precision,
            "micro_batch_size": case.rows,
            "max_steps": steps,
            "learning_rate": 1e-4,
            "schedule": "constant",
            "warmup_share": 0,
            "sanity_steps": 0,
        },
        **({"lora": lora} if case.method == "lora" else {}),
    }
    for section, settings in (changes or {}).items():
        values[section] = values.get(section, {}) | settings
    file = directory / "run.json"  # JSON is YAML
    file.write_text(json.dumps(values), encoding="utf-8")
    run = Run.of(run_file.load(file))
    run.freeze()
    with contextlib.redirect_stdout(io.StringIO()):
        stage.perform(run, "env", env.work)
        stage.perform(run, "download", download.work)
        if engine == "torch":  # else it would leave attention to transformers
            stage.perform(run, "certify", certify.work)
    if not (rows := run.paths.dataset_path / "train").exists():
        write_rows(rows, case, steps)
    return run.paths.directory


def write_rows(directory: Path, case: Case, steps: int) -> None:
    """Random tokens in the format of a prepared dataset; all but a document's first count in the loss."""
    directory.mkdir(parents=True)
    length = case.max_length // case.documents
    shape = (case.rows * steps, case.max_length)
    input_ids = np.random.default_rng(0).integers(3, case.geometry.vocabulary, shape, np.int32)
    position_ids = np.broadcast_to(np.tile(np.arange(length, dtype=np.int32), case.documents), shape)
    labels = np.where(position_ids == 0, np.int32(-100), input_ids)
    for name, array in (("input_ids", input_ids), ("labels", labels), ("position_ids", position_ids)):
        np.save(directory / f"{name}.npy", array)
