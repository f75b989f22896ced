"""Genuine sharded checkpoints of the Trainium stack, with what upstream makes of them.

They are too large for the repository: `fixtures/nxd` in a directory beside it, or what HYPERPOD_FT_NXD_FIXTURES names.
"""

import os
from pathlib import Path

import pytest


def _find() -> Path | None:
    named = os.environ.get("HYPERPOD_FT_NXD_FIXTURES")
    beside = Path(__file__).resolve().parents[3].glob("*/fixtures/nxd")
    return Path(named) if named else next(iter(sorted(beside)), None)


DIRECTORY = _find()
NAMES = sorted(path.parent.name for path in DIRECTORY.glob("*/checkpoint-4")) if DIRECTORY else []

needed = pytest.mark.skipif(DIRECTORY is None, reason="no fixtures/nxd beside the repository")


def directory(name: str) -> Path:
    assert DIRECTORY is not None
    return DIRECTORY / name
