"""Stage dataset as a program: what it imports, and that SIGKILL at any moment does not change what it publishes."""

import functools
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.stage_runs import finished, start, tree
from tests.unit.stages.dataset_runs import dolly, prepared_run
from tests.waiting import wait_for


def chats() -> bytes:
    messages = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "fox"}]
    return json.dumps({"messages": messages}).encode()


@pytest.mark.parametrize("format_", ["dolly", "chat"])
def test_torch_is_not_imported_and_transformers_for_chats_alone(tmp_path: Path, format_: str) -> None:
    """Chats are rendered by transformers, which would import torch if it could."""
    run = prepared_run(tmp_path, dolly(3) if format_ == "dolly" else chats(), format=format_)
    # modules of these names that cannot be imported: whoever tries fails
    for name in ("torch", "transformers") if format_ == "dolly" else ("torch",):
        (tmp_path / "poison" / name).mkdir(parents=True)
        (tmp_path / "poison" / name / "__init__.py").write_text(f"raise RuntimeError('{name} was imported')")
    process = start("dataset", run, PYTHONPATH=str(tmp_path / "poison"))
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output


def _children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def _alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _are(directory: Path, count: int) -> bool:
    return len(list(directory.iterdir())) == count


def _all_ended(pids: list[int]) -> bool:
    return not any(_alive(pid) for pid in pids)


# The stage, which goes no further once it tokenizes, or once it has written rows: it may run ahead of who looks.
HELD = """
import os, sys, time
from pathlib import Path
from hyperpod_ft.data import prepared, workers
from hyperpod_ft.stages import dataset, stage
moment, marks, run = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
def hold(*_):
    (marks / str(os.getpid())).touch()
    time.sleep(3600)
write = prepared.write_split
def some(blocks):
    for block in blocks:
        yield block
        hold()
if moment == "tokenizing":
    workers.tokenize_chunk = hold
else:
    prepared.write_split = lambda directory, name, blocks, rows: write(directory, name, some(blocks), rows)
stage.main("dataset", dataset.work, [run])
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_kill_9_at_two_moments_then_the_same_bytes(tmp_path: Path) -> None:
    rows = dolly(6_000)
    undisturbed = prepared_run(tmp_path / "undisturbed", rows, workers=2, validation_share=0.1)
    assert finished("dataset", undisturbed)[0] == 0

    run = prepared_run(tmp_path / "killed", rows, workers=2, validation_share=0.1)
    partial = run.paths.dataset_path.with_name(f".{run.paths.dataset_path.name}.partial")
    for moment, workers in (("tokenizing", 2), ("writing", 0)):
        marks = tmp_path / moment
        marks.mkdir()
        process = subprocess.Popen([sys.executable, "-c", HELD, moment, marks, run.paths.directory])
        try:
            wait_for(functools.partial(_are, marks, workers or 1), what=moment, process=process)
            below = _children(process.pid)
            assert len(below) == workers and (partial / "train" / "input_ids.npy").exists() == (moment == "writing")
        finally:
            process.kill()
        assert process.wait() == -signal.SIGKILL
        assert not run.paths.dataset_path.exists()
        assert run.journal.record("dataset") is None
        wait_for(functools.partial(_all_ended, below), 300, "workers outlive the stage")

    status, output = finished("dataset", run)
    assert status == 0, output
    assert tree(run.paths.dataset_path) == tree(undisturbed.paths.dataset_path)
    assert not partial.exists()
    assert finished("dataset", run) == (0, "dataset: already done, nothing to do\n")
