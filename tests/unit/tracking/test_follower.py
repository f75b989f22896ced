"""The follower: what it publishes when, and that nothing that a tracker does reaches a training."""

import json
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.run import Run
from hyperpod_ft.tracking import follower
from hyperpod_ft.tracking.content import TrackerState, final
from hyperpod_ft.tracking.follower import Follower, Shutdown, follow
from tests.programs import call
from tests.unit.tracking.conftest import MakeRun, finish, log, losses
from tests.waiting import wait_for

# A tracker's interpreter, in shell: it keeps every request, and answers as CASE says.
STAND_IN = """#!/bin/bash
echo start >>starts
while read -r request; do
  case $request in
    *'"open"'*) printf '{"step": null, "where": "here"}\\n'; continue ;;
  esac
  if [[ -e broken ]]; then cat broken; exit 1; fi
  if [[ -e hangs ]]; then exec sleep 600; fi
  printf '%s\\n' "$request" >>requests
  printf '{}\\n'
done
"""


@pytest.fixture
def stand_in(tracked: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    program = tmp_path / "python"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    run = tracked("mlflow", python=str(program))
    run.paths.tracking.mkdir()
    monkeypatch.setattr(follower, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(follower, "_FIRST_PAUSE_SECONDS", 0.05)
    return run


def requests(run: Run) -> list[dict[str, object]]:
    path = run.paths.tracking / "requests"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def published(run: Run) -> list[int]:
    return [row["step"] for request in requests(run) for row in request.get("rows", [])]  # type: ignore[attr-defined]


def catch_up(run: Run, seconds: float = 300) -> dict[str, TrackerState]:
    shutdown = Shutdown()
    shutdown.begin(seconds)
    return follow(run, shutdown)


def test_each_step_is_published_once_by_followers_that_are_killed(tracked: MakeRun) -> None:
    """With TensorBoard's own files. The training goes back to its checkpoint meanwhile, and makes steps again."""
    run = tracked("tensorboard")
    log(run, range(1, 6))
    program = [sys.executable, "-m", "hyperpod_ft.tracking.follower", str(run.paths.directory)]
    first = subprocess.Popen(program, stdin=subprocess.PIPE)
    wait_for(lambda: TrackerState.read(run, "tensorboard").step == 5)
    first.send_signal(signal.SIGKILL)
    first.wait()
    run.paths.metrics_path.unlink()
    log(run, [*range(1, 4), *range(4, 8)])  # resumed from step 3
    second = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    wait_for(lambda: TrackerState.read(run, "tensorboard").step == 7)
    log(run, [8])
    finish(run, final_loss=0.25)
    output, _ = second.communicate("", timeout=300)
    assert f"tensorboard: published to step 8 {run.paths.tracking / 'tensorboard'}\n" in output
    assert losses(run) == [(step, pytest.approx(2 / step)) for step in range(1, 9)]
    assert TrackerState.read(run, "tensorboard").final == {"final/final_loss": 0.25}


def test_what_a_killed_follower_had_not_noted_is_not_published_again(tracked: MakeRun) -> None:
    run = tracked("tensorboard")
    log(run, range(1, 4))
    before = catch_up(run)["tensorboard"]
    TrackerState(before.key, step=1).write(run, "tensorboard")  # as if killed between the tracker's answer and this
    log(run, [4])
    assert catch_up(run)["tensorboard"].step == 4
    assert [step for step, _ in losses(run)] == [1, 2, 3, 4]


def test_rows_and_then_the_figures_are_published_and_only_once(stand_in: Run) -> None:
    log(stand_in, range(1, 451))
    finish(stand_in, final_loss=0.25)
    state = catch_up(stand_in)["mlflow"]
    assert (state.step, state.where, state.problem) == (450, "here", "")
    assert published(stand_in) == list(range(1, 451))
    [figures] = [request for request in requests(stand_in) if "final" in request]
    assert figures == {"final": {"final/final_loss": 0.25}, "step": 450}
    assert requests(stand_in)[-1] == {"end": True}
    count = len(requests(stand_in))
    assert catch_up(stand_in)["mlflow"] == state
    assert len(requests(stand_in)) == count
    finish(stand_in, final_loss=0.25, validation_loss=0.5)
    catch_up(stand_in)
    assert [request["final"] for request in requests(stand_in) if "final" in request][1:] == [
        {"final/validation_loss": 0.5}
    ]


def test_a_tracker_that_fails_catches_up_with_a_later_row(stand_in: Run, capfd: pytest.CaptureFixture[str]) -> None:
    broken = stand_in.paths.tracking / "broken"
    broken.write_text('{"problem": "ConnectionError: no route"}\n')
    shutdown = Shutdown()
    thread = threading.Thread(target=follow, args=(stand_in, shutdown))
    thread.start()
    log(stand_in, [1, 2])
    starts = stand_in.paths.tracking / "starts"
    wait_for(lambda: starts.exists() and len(starts.read_text().splitlines()) >= 3)
    assert TrackerState.read(stand_in, "mlflow").problem == "ConnectionError: no route"
    broken.unlink()
    wait_for(lambda: TrackerState.read(stand_in, "mlflow").step == 2)
    log(stand_in, [3])
    shutdown.begin(300)
    thread.join(300)
    assert published(stand_in) == [1, 2, 3]
    assert TrackerState.read(stand_in, "mlflow").problem == ""
    printed = capfd.readouterr().out
    assert printed.count("tracking: mlflow: ConnectionError: no route; training is not affected") == 1


def test_a_tracker_that_hangs_is_left_in_time_and_catches_up_later(stand_in: Run) -> None:
    (stand_in.paths.tracking / "hangs").touch()
    log(stand_in, [1])
    begun = time.monotonic()
    state = catch_up(stand_in, seconds=0.5)["mlflow"]
    assert time.monotonic() - begun < 300, "it would answer after 600 s"
    assert (state.step, state.problem) == (0, "the tracker did not answer in time")
    (stand_in.paths.tracking / "hangs").unlink()
    assert catch_up(stand_in)["mlflow"].step == 1
    assert published(stand_in) == [1]


def test_a_tracker_that_hangs_does_not_hold_up_another(tracked: MakeRun, stand_in: Run) -> None:
    """Both have the stand-in's program; only one has a request that is not answered."""
    python = stand_in.config.tracking.python
    run = tracked("mlflow", "trackio", python=python)
    Path(str(python)).write_text(STAND_IN.replace("-e hangs", "$3 == trackio && -e hangs"))
    (run.paths.tracking / "hangs").touch()
    log(run, [1])
    shutdown = Shutdown()
    with ThreadPoolExecutor() as pool:
        followed = pool.submit(follow, run, shutdown)
        try:
            wait_for(lambda: TrackerState.read(run, "mlflow").step == 1)
        finally:
            shutdown.begin(0.5)
        assert followed.result(300)["trackio"].problem == "the tracker did not answer in time"


@pytest.mark.parametrize(
    ("python", "problem"),
    [("/nowhere/python", "no interpreter at /nowhere/python"), (sys.executable, "cannot import mlflow")],
)
def test_a_tracker_that_is_not_installed(
    tracked: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, python: str, problem: str
) -> None:
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "__init__.py").write_text("raise ImportError('No module named mlflow')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = tracked("mlflow", python=python)
    log(run, [1])
    assert problem in catch_up(run)["mlflow"].problem


def test_two_followers_take_turns(stand_in: Run) -> None:
    log(stand_in, [1])
    shutdown = Shutdown()
    thread = threading.Thread(target=follow, args=(stand_in, shutdown))
    thread.start()
    wait_for(lambda: published(stand_in) == [1])
    log(stand_in, [2])
    assert "locked by another process" in catch_up(stand_in)["mlflow"].problem
    shutdown.begin(300)
    thread.join(300)
    assert published(stand_in) == [1, 2]


def test_a_held_lock_is_reported_once(
    stand_in: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(follower, "_POLL_SECONDS", 0.01)
    shutdown, reads = Shutdown(), list[int]()
    read = TrackerState.read
    monkeypatch.setattr(TrackerState, "read", lambda *arguments: (reads.append(1), read(*arguments))[1])
    stand_in.paths.tracking.mkdir(parents=True, exist_ok=True)
    with publish.lock(stand_in.paths.tracking / "mlflow.lock"):
        thread = threading.Thread(target=Follower(stand_in, "mlflow", shutdown).follow)
        thread.start()
        wait_for(lambda: len(reads) > 5)
        shutdown.begin(300)
        thread.join(300)
    assert capsys.readouterr().out.count("locked by another process") == 1


def test_final_figures_are_numbers(tracked: MakeRun) -> None:
    run = tracked(cluster__price_per_node_hour=2.0)
    assert final(run) == {}
    finish(run, final_loss=0.25, node_hours=1.5, mfu=None)
    assert final(run) == {"final/final_loss": 0.25, "final/node_hours": 1.5, "final/cost": 3.0}


def test_logs_have_no_secrets(tracked: MakeRun, stand_in: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "correct horse")
    Path(str(stand_in.config.tracking.python)).write_text(
        '#!/bin/bash\nread -r request; echo "denied: $MLFLOW_TRACKING_PASSWORD" >&2\n'
        'printf \'{"problem": "https://user:hunter2@host denied %s"}\\n\' "$MLFLOW_TRACKING_PASSWORD"\n'
    )
    log(stand_in, [1])
    state = catch_up(stand_in)["mlflow"]
    assert state.problem == "https://***@host denied ***"
    assert (stand_in.paths.logs / "tracking-mlflow.log").read_text() == "denied: ***\n" * 2


def test_the_address_of_a_tracker_is_kept_without_its_password(stand_in: Run) -> None:
    program = Path(stand_in.config.tracking.python or "")
    program.write_text(STAND_IN.replace('"here"', '"postgresql://me:secret@host/runs"'))
    log(stand_in, [1])
    assert catch_up(stand_in)["mlflow"].where == "postgresql://***@host/runs"
    assert "secret" not in (stand_in.paths.tracking / "mlflow.json").read_text()


def test_a_tracker_that_prints_something_else_is_tried_again(stand_in: Run) -> None:
    (stand_in.paths.tracking / "broken").write_text("Traceback\n")
    log(stand_in, [1])
    assert "something else" in catch_up(stand_in)["mlflow"].problem
    (stand_in.paths.tracking / "broken").unlink()
    assert catch_up(stand_in)["mlflow"].step == 1


def test_the_command_catches_up(stand_in: Run) -> None:
    log(stand_in, [1, 2])
    broken = stand_in.paths.tracking / "broken"
    broken.write_text('{"problem": "ConnectionError: no route"}\n')
    done = call("track", stand_in.paths.directory)
    assert (done.returncode, "mlflow: published to step 0 ConnectionError: no route\n" in done.stdout) == (1, True)
    broken.unlink()
    done = call("track", stand_in.paths.directory)
    assert (done.returncode, done.stdout) == (0, "mlflow: published to step 2 here\n")
    assert published(stand_in) == [1, 2]


def test_a_state_that_cannot_be_read_publishes_nothing(stand_in: Run) -> None:
    """It may say that all is published: under a new key all would be published again."""
    log(stand_in, [1])
    path = stand_in.paths.tracking / "mlflow.json"
    path.symlink_to(path.name)
    assert "symbolic links" in catch_up(stand_in)["mlflow"].problem
    path.unlink()
    path.write_text('{"key": ')
    assert f"{path}: is damaged" in catch_up(stand_in)["mlflow"].problem
    assert published(stand_in) == []
    path.unlink()
    assert catch_up(stand_in)["mlflow"].step == 1


def test_an_error_of_the_run_does_not_end_the_tracker(stand_in: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    repaired = threading.Event()

    def damaged_at_first(run: Run) -> dict[str, float]:
        if not repaired.is_set():
            raise UserError("records/eval.json: is damaged")
        return final(run)

    monkeypatch.setattr(follower, "final", damaged_at_first)
    shutdown = Shutdown()
    thread = threading.Thread(target=follow, args=(stand_in, shutdown))
    thread.start()
    try:
        wait_for((stand_in.paths.tracking / "mlflow.json").exists)
        assert TrackerState.read(stand_in, "mlflow").problem == "records/eval.json: is damaged"
        repaired.set()
        log(stand_in, [1])
        wait_for(lambda: published(stand_in) == [1])
    finally:
        shutdown.begin(300)
        thread.join(300)
    assert not thread.is_alive()
