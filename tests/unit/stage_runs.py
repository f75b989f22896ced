"""Runs in a temporary root, and records of the stages that a test does not run."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from hyperpod_ft import digests
from hyperpod_ft.config import run_file
from hyperpod_ft.runs.records import Record, outputs_of, utc_now
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import Selection, choose
from tests.programs import commands


def make_run(
    base: Path, model: str, dataset: dict[str, Any], revision: str | None = None, more: Mapping[str, Any] = {}
) -> Run:
    """A run frozen in its directory below `base`/root; its `env` stage counts as done, but left no interpreter.

    `more`: further sections.
    """
    values = {
        "name": "test",
        "engine": "torch",
        "cluster": {"root": str(base / "root"), "instance_type": "local"},
        "parallelism": {"ranks_per_node": 1},
        "model": {"source": model, "revision": revision},
        "dataset": dataset,
        **more,
    }
    run = Run.of(run_file.resolve(run_file.validate(values, "test"), base))
    run.freeze()
    finish(run, "env")
    return run


def weights(**tensors: bytes) -> bytes:
    """A safetensors file with these bytes as tensors."""
    return bytes(save({name: np.frombuffer(content, np.uint8) for name, content in tensors.items()}))


def finish(run: Run, stage: str, *outputs: Path, digests: bool = True, facts: Mapping[str, Any] = {}) -> None:
    """Write the record of a stage that this test does not run, and that wrote these outputs."""
    found, given = outputs_of(run.paths.root, outputs, digests=digests), dict(facts)
    record = Record(stage, run.plan[stage].fingerprint, {}, found, given, utc_now(), 0.0, "test", "")
    record.write(run.paths.record_path(stage))


def finish_all(run: Run, *, but: str = "") -> None:
    """Write the records of all stages, or of all but one, without outputs."""
    for stage_plan in run.plan.stages:
        if stage_plan.name != but:
            finish(run, stage_plan.name)


def chosen(run: Run, **selection: object) -> list[str]:
    """The stages that a submission would run."""
    return [stage_plan.name for stage_plan in choose(run, Selection(**selection))]  # type: ignore[arg-type]


def start(stage: str, run: Run, **environment: str) -> "subprocess.Popen[str]":
    """The stage program as a job starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", f"hyperpod_ft.stages.{stage}", str(run.paths.directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )


def finished(stage: str, run: Run, **environment: str) -> tuple[int, str]:
    """Exit status and output of the stage program."""
    arguments = [f"hyperpod_ft.stages.{stage}", str(run.paths.directory)]
    with tempfile.NamedTemporaryFile() as output:
        status = commands().start(arguments, os.environ | environment, Path(output.name)).wait(300)
        return status, Path(output.name).read_text()


def tree(directory: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {file.relative_to(directory).as_posix(): file.read_bytes() for file in digests.files_below(directory)}
