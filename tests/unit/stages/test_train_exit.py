"""The exit status of stage train where Python's own exit would abort the process, as it sometimes does."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hyperpod_ft.runs.run import Run


@pytest.mark.parametrize(
    ("world_size", "status", "said"), [("7", 2, "error: train: started as 7 process(es)"), ("?", 1, "ValueError")]
)
def test_the_status_does_not_depend_on_the_teardown(
    make_run: Callable[..., Run], tmp_path: Path, world_size: str, status: int, said: str
) -> None:
    run = make_run()
    run.freeze()
    (tmp_path / "sitecustomize.py").write_text("import atexit, os\natexit.register(os.abort)\n")
    ended = subprocess.run(
        [sys.executable, "-m", "hyperpod_ft.stages.train", str(run.paths.directory)],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "WORLD_SIZE": world_size},
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == status, ended.stderr
    assert said in ended.stdout + ended.stderr
