"""Whole or not at all."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

import pytest

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs import volume_lock


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    publish.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        publish.write_json(path, {"a": object()})
    with pytest.raises(UnicodeEncodeError):
        publish.write_text(path, "\udcff")
    assert path.read_text() == '{\n  "a": 1\n}\n'
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def test_new_files_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        publish.write_text(tmp_path / "x", "")
    finally:
        os.umask(old)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_a_directory_appears_only_when_complete(tmp_path: Path) -> None:
    final = tmp_path / "final"
    with pytest.raises(RuntimeError), publish.new_directory(final) as partial:
        (partial / "a").write_text("half")
        raise RuntimeError
    assert not final.exists()
    with publish.new_directory(final) as partial:
        (partial / "a").write_text("1")
        assert not final.exists()
    with publish.new_directory(final) as partial:
        (partial / "b").write_text("2")
    assert [path.name for path in tmp_path.rglob("*")] == ["final", "b"], "replaced whole, nothing left over"


def test_a_partial_download_is_handed_on(tmp_path: Path) -> None:
    final = tmp_path / "final"
    with pytest.raises(RuntimeError), publish.new_directory(final, keep_partial=True) as partial:
        (partial / "a").write_text("1")
        raise RuntimeError
    with publish.new_directory(final, keep_partial=True) as partial:
        assert (partial / "a").read_text() == "1"


def test_what_a_killed_writer_left_is_cleared(tmp_path: Path) -> None:
    final = tmp_path / "final"
    program = (
        "import os, pathlib, sys; from hyperpod_ft import publish\n"
        "with publish.new_directory(pathlib.Path(sys.argv[1])) as partial:\n"
        "    (partial / 'a').write_text('half'); os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, final], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not final.exists()
    with publish.new_directory(final) as partial:
        assert list(partial.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_the_lock_lets_one_in_and_a_death_frees_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import pathlib, sys, time; from hyperpod_ft import publish\n"
        "with publish.lock(pathlib.Path(sys.argv[1])):\n"
        "    print('held', flush=True); time.sleep(3600)\n"
    )
    lock = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", program, lock], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        flock, waits, killed = fcntl.flock, threading.Event(), threading.Event()

        def flock_and_say(stream: IO[str], kind: int) -> None:
            if not kind & fcntl.LOCK_NB:
                waits.set()
            flock(stream, kind)

        def kill_once_it_waits() -> None:
            waits.wait(300)
            time.sleep(0.1)  # in the kernel
            killed.set()
            holder.kill()

        monkeypatch.setattr(fcntl, "flock", flock_and_say)
        threading.Thread(target=kill_once_it_waits).start()
        with publish.lock(lock, waiting="waiting"):
            assert killed.is_set()
    assert capsys.readouterr().out == "waiting\n"


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("patience", [None, 5])
def test_a_volume_without_locks_is_a_users_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, patience: float | None
) -> None:
    """Also when it says so only to the call that waits for another process."""
    calls = []

    def flock(*_: object) -> None:
        calls.append(1)
        raise OSError(errno.ENOLCK, "No locks available") if len(calls) == failing else BlockingIOError()

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UserError, match="this volume has no file locks"), publish.lock(tmp_path / "x", "", patience):
        pass
    calls.clear()
    with pytest.raises(UserError, match="this volume has no file locks"), volume_lock.submitting(tmp_path):
        pass


@pytest.mark.parametrize("call", [1, 2])
def test_the_one_before_may_remove_its_lock_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    calls = []
    stat = Path.stat

    def removed_meanwhile(path: Path, **options: bool) -> os.stat_result:
        if path.name == ".new.lock":
            calls.append(path)
            if len(calls) == call:
                path.unlink()
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", removed_meanwhile)
    with publish.sole_writer(tmp_path / "new"):
        assert ".new.lock" in os.listdir(tmp_path)  # noqa: PTH208 - without calling Path.stat
