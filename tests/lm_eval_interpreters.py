"""Interpreters with lm-evaluation-harness: one with a stand-in for it, and the real one where there is one."""

import os
import shlex
import sys
from pathlib import Path

import pytest

STAND_IN = Path(__file__).resolve().parent / "stand_ins" / "lm_evaluation_harness"


def with_stand_in(directory: Path) -> Path:
    """This interpreter, with a stand-in for the harness; it logs to `evaluated.jsonl` there."""
    directory.mkdir(exist_ok=True)
    python = directory / "python"
    python.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={shlex.quote(str(STAND_IN))}:$PYTHONPATH"
        f" STAND_IN_LOG={shlex.quote(str(directory / 'evaluated.jsonl'))}\n"
        f'exec {shlex.quote(sys.executable)} "$@"\n'
    )
    python.chmod(0o755)
    return python


def real() -> Path:
    """Skips the test where there is none."""
    given = os.environ.get("HYPERPOD_FT_LM_EVAL_PYTHON")
    if not given:
        pytest.skip("HYPERPOD_FT_LM_EVAL_PYTHON is not set")
    return Path(given)
