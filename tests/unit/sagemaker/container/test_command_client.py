"""What a container makes of the output of its commands; an image's Python may print something of its own."""

import sys
from pathlib import Path

import pytest

from hyperpod_ft.sagemaker.container.command_client import ContainerCommands
from hyperpod_ft.sagemaker.container.host import ContainerHost, Hyperparameters


@pytest.mark.parametrize(("printed", "seconds"), [("12.5", 12.5), ("hello\\n12.5", 12.5), ("hello", None), ("", None)])
def test_what_an_image_prints_is_not_taken_for_an_answer(tmp_path: Path, printed: str, seconds: float | None) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nprintf '{printed}'\n")
    python.chmod(0o755)
    parameters = Hyperparameters("quick-1", "train", "train", str(tmp_path), str(tmp_path), "600", sys.executable)
    assert ContainerCommands(ContainerHost(("algo-1",), 0, "", parameters), str(python)).seconds_used() == seconds
