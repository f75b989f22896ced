"""Two machines of one run, and the client of its store."""

from pathlib import Path

import pytest

from hyperpod_ft.runs.run import Run
from tests.aws.run_store.stored_runs import make_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "one")


@pytest.fixture
def other(tmp_path: Path) -> Run:
    return make_run(tmp_path / "two")
