"""Run files that are valid but for what a test changes."""

from pathlib import Path

import pytest
import yaml

from hyperpod_ft.config import run_file
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.parallelism import degrees_of
from tests.conftest import run_file_values


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def load(tmp_path: Path, *overrides: str, **values: object) -> run_file.RunConfig:
    """Also what the engine cannot do is refused, as by `plan`."""
    config = run_file.load(write(tmp_path, yaml.safe_dump(run_file_values(tmp_path, **values))), overrides)
    degrees_of(config)
    return config


def refused(tmp_path: Path, *overrides: str, **values: object) -> str:
    with pytest.raises(UserError) as error:
        load(tmp_path, *overrides, **values)
    assert "\n" not in str(error.value), "one problem is one line"
    return str(error.value)
