"""The rehearsals, as README and docs write them, and what ends with the stand-in for AWS."""

import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from hyperpod_ft.processes import all_pids
from tests.aws.endpoint_run import make_run
from tests.aws.kit import ROOT
from tests.waiting import wait_for

pytestmark = [pytest.mark.training, pytest.mark.timeout(1200)]

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
COMMANDS = sorted(
    {command for page in PAGES for command in re.findall(r"\./scripts/rehearse-\w+\.sh", page.read_text())}
)
# beside some of them, a copy is told to end, when it has printed this
COPIES = {
    "./scripts/rehearse-cluster.sh": (signal.SIGINT, "hyperpod-ft cluster create"),
    "./scripts/rehearse-sagemaker.sh": (signal.SIGTERM, "(env|certify) +running"),
}


class Rehearsal:
    """A script that runs in the checkout, with a directory for all that it writes."""

    def __init__(self, directory: Path, command: str, *arguments: str) -> None:
        self.directory, self.log = directory, directory.with_suffix(".log")
        directory.mkdir()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command.split(), *arguments],
                cwd=ROOT,
                env=environment | {"TMPDIR": str(directory), "PIP_NO_INDEX": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until(self, pattern: str) -> None:
        wait_for(lambda: re.search(pattern, self.log.read_text()), 300, self.log.read_text, process=self.process)

    def finish(self) -> tuple[int, str]:
        """Its exit status and output, with nothing of it left: no process, no file."""
        self.process.wait(1000)
        output = self.log.read_text()
        wait_for(lambda: not self.processes(), 300, output)
        assert not list(self.directory.iterdir()), output
        return self.process.returncode, output

    def processes(self) -> list[dict[str, str]]:
        """The environments of its processes."""
        environments = []
        for pid in all_pids():
            with suppress(OSError):
                pairs = (
                    pair.split("=", 1) for pair in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in pair
                )
                environments.append(dict(pairs))
        return [found for found in environments if found.get("TMPDIR", "").startswith(str(self.directory))]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_run(tmp_path_factory.mktemp("deploy")).paths.directory)


@pytest.mark.parametrize("command", COMMANDS)
def test_it_ends_well_also_beside_a_copy_that_is_told_to_end(tmp_path: Path, finished: str, command: str) -> None:
    rehearsal = Rehearsal(tmp_path / "one", command, *([finished] if "endpoint" in command else []))
    if command in COPIES:
        told, middle = COPIES[command]
        copy = Rehearsal(tmp_path / "two", command)
        copy.wait_until(middle)
        copy.process.send_signal(told)
        began = time.monotonic()
        status, output = copy.finish()
        assert status == 128 + told, output
        assert "Rehearsed" not in output
        assert time.monotonic() - began < 300, "at once"
    status, output = rehearsal.finish()
    assert status == 0, output
    assert "Rehearsed" in output
    assert "Setting up .venv" not in output
    if "sagemaker" in command:
        path = re.search(r"-train-1: (.*)", output)
        assert path and path[1].endswith("Completed") and path[1].count("Interrupted") == 1, output
        assert "-train-2" not in output


def test_the_pages_name_all() -> None:
    scripts = {f"./scripts/{script.name}" for script in (ROOT / "scripts").glob("rehearse-*.sh")}
    assert scripts == set(COMMANDS)
