"""A stage's script in a container: its output, its error, its signals."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.waiting import wait_for

REPOSITORY = Path(__file__).resolve().parents[4]

# One script of a stage, as the entry runs it. Prints what it knows of it afterwards.
PROGRAM = """
import sys
from pathlib import Path
from hyperpod_ft.sagemaker.container import script
path, stage, log = sys.argv[1:4]
notice_after, script.SECONDS_TO_END = map(float, sys.argv[4:])
stop = script.Stop(notice_after)
ran = script.Script(Path(path), stage, {"GIVEN": "yes"}, Path(log) if log else None)
status = ran.wait(stop)
print("status", status, repr(ran.error), repr(ran.last_line), flush=True)
"""


def start(
    directory: Path,
    text: str,
    stage: str = "dataset",
    leads: bool = True,
    notice_after: float = 600,
    to_end: float = 300,
) -> "subprocess.Popen[str]":
    (directory / "script").write_text(text)
    log = str(directory / "logs" / "log") if leads else ""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, directory / "script", stage, log, str(notice_after), str(to_end)],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    )


def end(process: "subprocess.Popen[str]") -> list[str]:
    output, _ = process.communicate(timeout=300)
    return output.splitlines()


def test_its_output_is_shown_and_kept_and_its_error_is_known(tmp_path: Path) -> None:
    text = 'echo "$GIVEN"; echo "error: dataset: no rows; add some" >&2; echo "Traceback"; exit 2'
    assert end(start(tmp_path, text)) == [
        *("yes", "error: dataset: no rows; add some", "Traceback"),
        "status 2 'dataset: no rows; add some' 'Traceback'",
    ]
    assert (tmp_path / "logs" / "log").read_text().splitlines()[0] == "yes"


def test_a_process_that_outlives_the_script_does_not_hold_it(tmp_path: Path) -> None:
    over = tmp_path / "over"
    try:
        lines = end(start(tmp_path, f"(until [[ -e {over} ]]; do sleep 0.1; done) & exit 0"))
    finally:
        over.touch()
    assert lines[-1].startswith("status 0")


def test_sigterm_ends_every_process_of_a_stage(tmp_path: Path) -> None:
    """bash alone would wait for the program that it runs."""
    process = start(
        tmp_path, "trap 'exit 143' TERM\n(trap 'touch told; exit 1' TERM; touch started; while :; do sleep 0.05; done)"
    )
    wait_for((tmp_path / "started").exists)
    process.send_signal(signal.SIGTERM)
    assert end(process)[-1].startswith("status 143") and (tmp_path / "told").exists()


def test_sigterm_reaches_the_supervisor_alone(tmp_path: Path) -> None:
    rank = "(trap 'touch rank' TERM; touch started; while [[ ! -e done ]]; do sleep 0.05; done) &"
    process = start(tmp_path, f"trap 'touch done; wait; exit 143' TERM\n{rank}\nwait", stage="train")
    wait_for((tmp_path / "started").exists)
    process.send_signal(signal.SIGTERM)
    assert end(process)[-1].startswith("status 143") and not (tmp_path / "rank").exists()


def test_another_host_has_its_ranks_save_at_sigterm(tmp_path: Path) -> None:
    text = "trap 'touch saved; exit 138' USR1; touch started; while :; do sleep 0.05; done"
    process = start(tmp_path, text, stage="train", leads=False)
    wait_for((tmp_path / "started").exists)
    process.send_signal(signal.SIGTERM)
    assert end(process)[-1].startswith("status 138") and (tmp_path / "saved").exists()


def test_the_time_after_sigterm_is_limited(tmp_path: Path) -> None:
    text = "trap '' TERM; echo $$ >pid; mv pid started; while :; do sleep 0.05; done"
    process = start(tmp_path, text, stage="train", to_end=2)
    wait_for((tmp_path / "started").exists)
    try:
        process.send_signal(signal.SIGTERM)
        assert end(process)[-1].startswith("status 143")
    finally:  # in a container it ends with PID 1
        os.killpg(int((tmp_path / "started").read_text()), signal.SIGKILL)


def test_the_notice_comes_from_a_timer_and_is_for_training(tmp_path: Path) -> None:
    text = "trap 'exit 138' USR1; for _ in {1..%d}; do sleep 0.05; done"
    assert end(start(tmp_path, text % 900, stage="train", notice_after=0.5))[-1].startswith("status 138")
    assert end(start(tmp_path, text % 40, stage="dataset", notice_after=0.5))[-1].startswith("status 0")
