"""Exit statuses, compared with those of a real shell."""

import subprocess

import pytest

from hyperpod_ft.runs.job_files import shell_status


@pytest.mark.parametrize("command", ["exit 0", "exit 3", "kill -USR1 $$", "kill -KILL $$"])
def test_the_status_is_what_a_shell_reports(command: str) -> None:
    returncode = subprocess.run(["bash", "-c", command], check=False).returncode
    shell = subprocess.run(["bash", "-c", f"bash -c '{command}'; echo $?"], capture_output=True, text=True, check=True)
    assert shell_status(returncode) == int(shell.stdout)
