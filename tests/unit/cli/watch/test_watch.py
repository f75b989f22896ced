"""`watch` on a terminal of its own: real processes as jobs, real keys and signals, and a terminal as it was before."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyperpod_ft.config import run_file
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.process.launcher import ProcessLauncher
from hyperpod_ft.launch.submit import cancel, prepare
from hyperpod_ft.processes import descendants
from hyperpod_ft.runs.run import Run
from tests.conftest import run_file_values
from tests.waiting import wait_for

SECONDS = 300
CANCEL_HINT = "No longer watching. Stop the run: hyperpod-ft cancel"
# a shell gives the command the terminal, takes it back, and continues it at the next line of input
SHELL = 'set -m; "$@"; echo "status $?"; read; fg; echo "status $?"'


class Screen:
    """A pseudo-terminal, a shell with the command in it, and everything that was written to it."""

    def __init__(self, run: Run, width: int = 100, height: int = 30) -> None:
        self._master, self.terminal = pty.openpty()
        self.resize(width, height)
        self.before = termios.tcgetattr(self.terminal)
        self.written = ""
        self._shell = subprocess.Popen(
            [
                "setsid",
                "--ctty",
                "bash",
                "-c",
                SHELL,
                "bash",
                sys.executable,
                "-m",
                "hyperpod_ft",
                "watch",
                run.paths.directory,
            ],
            stdin=self.terminal,
            stdout=self.terminal,
            stderr=self.terminal,
            env=os.environ | {"TERM": "xterm-256color", "HYPERPOD_FT_POLL_SECONDS": "0.2", "PYTHONUTF8": "1"},
        )

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def press(self, keys: str, pattern: str) -> None:
        """Type, and wait until the pattern was written since."""
        before = len(self.text)
        self.type(keys)
        self.wait_for(pattern, before)

    def signal(self, number: signal.Signals) -> None:
        """To the command."""
        (command,) = descendants(self._shell.pid)
        os.kill(command, number)

    def wait_for(self, pattern: str, after: int = 0) -> "re.Match[str]":
        """Until the pattern was written, since there were `after` characters."""
        deadline = time.monotonic() + SECONDS
        while not (found := re.search(pattern, self.text[after:])):
            assert time.monotonic() < deadline, self.written
            if select.select([self._master], [], [], 0.02)[0]:
                self.written += os.read(self._master, 1 << 16).decode("utf-8", "replace")
        return found

    def assert_given_back(self, status: int, after: int = 0) -> None:
        """The command ended with this status, or was suspended, and left everything as it was before."""
        assert int(self.wait_for(r"status (\d+)", after)[1]) == status
        assert termios.tcgetattr(self.terminal) == self.before
        assert self.written.rindex("\x1b[?1049l") > self.written.rindex("\x1b[?1049h"), "the screen"
        assert self.written.rindex("\x1b[?25h") > self.written.rindex("\x1b[?25l"), "the cursor"
        assert "Traceback" not in self.text

    @property
    def text(self) -> str:
        """Without sequences that only move the cursor or set colours."""
        return re.sub(r"\x1b\[[\d;]*[mHK]", "", self.written)

    def close(self) -> None:
        for process in (*descendants(self._shell.pid), self._shell.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._shell.wait()
        os.close(self._master)
        os.close(self.terminal)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Its first job works until it is cancelled, and the others wait."""
    root = tmp_path_factory.mktemp("volume")
    run = Run.of(run_file.resolve(run_file.validate(run_file_values(root), "run.yaml"), root))
    prepare(run, Launchers())
    run.paths.script("env").write_text("echo 'first line'; echo 'env: second line'; exec sleep 3600\n")
    ProcessLauncher().submit(run, run.plan.stages, {})
    log = run.paths.log("env", "p1")
    wait_for(lambda: log.exists() and "second line" in log.read_text())
    wait_for(lambda: "RUNNING" in [state.state for state in Launchers().active(run).values()])
    yield run
    cancel(run, Launchers())


@pytest.fixture
def screen(run: Run) -> Iterator[Screen]:
    screen = Screen(run)
    screen.wait_for("env: second line")
    yield screen
    screen.close()


def test_keys_choose_suspend_and_leave(run: Run, screen: Screen) -> None:
    first = screen.wait_for(f"{run.config.name}  (\\w+)  (\\d+) of (\\d+) stages done")
    stages = len(run.plan.stages)
    assert first.groups() == ("unknown", "0", str(stages)), "by the run's files, before its launcher is asked"
    screen.wait_for(f"{run.config.name}  running  0 of {stages} stages done")
    assert "log of env: none yet" not in screen.text, "the first picture is of the run's files already"
    screen.press("\x1b[B", "log of download: none yet")
    screen.press("\x1b[A\r", r"submitted \w+ ago\s+log of env: \S+ ─+\s+first line\s+env: second line")
    screen.press("\x1b", "› env")
    screen.press("\x1b[B", "log of download: none yet")
    seen = len(screen.text)
    screen.type("\x1a")
    screen.assert_given_back(128 + signal.SIGTSTP)
    screen.press("\n", "log of download: none yet")
    seen = len(screen.text)
    screen.resize(40, 8)
    screen.wait_for("› download", seen)
    seen = len(screen.text)
    screen.type("q")
    screen.assert_given_back(0, seen)
    assert CANCEL_HINT in screen.text[seen:]
    assert Launchers().active(run), "the run continues"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_signal_leaves_the_terminal_as_it_was(run: Run, screen: Screen, number: signal.Signals) -> None:
    if number == signal.SIGINT:
        screen.type("\x03")
    else:
        screen.signal(number)
    screen.assert_given_back(128 + number)
    assert Launchers().active(run), "the run continues"


def test_without_a_terminal_there_are_lines(run: Run, tmp_path: Path) -> None:
    lines = tmp_path / "output"
    with lines.open("w") as output:
        watching = subprocess.Popen(
            [sys.executable, "-m", "hyperpod_ft", "watch", run.paths.directory],
            stdin=subprocess.DEVNULL,
            stdout=output,
            env=os.environ | {"TERM": "xterm"},
        )
    wait_for(lambda: re.fullmatch(r"\d\d:\d\d:\d\d  env          running\n", lines.read_text()), what=lines.read_text)
    watching.send_signal(signal.SIGINT)
    assert watching.wait(SECONDS) == 130
    assert CANCEL_HINT in lines.read_text() and "\x1b" not in lines.read_text()


def test_cancelling_asks_and_ends_every_job(run: Run, screen: Screen) -> None:
    """Last, for all tests share the run. The end of a run stays on the screen."""
    screen.type("cn")
    seen = len(screen.text)
    screen.type("c")
    screen.wait_for("Cancel the jobs of test", seen)
    assert Launchers().active(run)
    screen.type("y")
    screen.wait_for("Cancelling…", seen)
    screen.assert_given_back(1)
    after = screen.text.rpartition("\x1b[?1049l")[2]
    assert "cancelled env (job p1)" in after and "Resume it: hyperpod-ft resume" in after
    assert re.search(r"env +cancelled +p1", after)
    assert not Launchers().active(run)
