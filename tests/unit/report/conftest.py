"""Pages that several tests open."""

from pathlib import Path

import pytest

from hyperpod_ft.report.gather import gather
from hyperpod_ft.report.page import write_report
from tests.unit.report.recorded_run import recorded_run


@pytest.fixture(scope="session")
def long_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page about a run with 100,000 logged steps."""
    base = tmp_path_factory.mktemp("long")
    write_report([gather(recorded_run(base, steps=100_000))], base / "report.html")
    return base / "report.html"
