"""What is shown of the log of a stage that failed."""

from pathlib import Path

from hyperpod_ft.launch.follow import last_lines
from hyperpod_ft.launch.status import StageStatus
from hyperpod_ft.runs.job_files import banner


def test_errors_before_the_last_restart_are_left_out(tmp_path: Path) -> None:
    log = tmp_path / "train.out"
    start = banner("train", "7")
    log.write_text(f"{start} on node-1\nerror: first\n{start}, restart 1\nerror: second\nsrun: error: node-1\n")
    assert last_lines(StageStatus("train", "failed", log=str(log))) == ["error: second"]
