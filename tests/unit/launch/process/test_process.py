"""Launcher `process`: the same scripts as plain processes, their states, and nothing left after a cancel."""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.interface import JobState
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.process.launcher import ProcessLauncher
from hyperpod_ft.launch.status import status
from hyperpod_ft.launch.submit import prepare, submit
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import Selection
from tests.conftest import MakeRun
from tests.waiting import wait_for


def prepared(make_run: MakeRun, **scripts: str) -> Run:
    """A run whose scripts are these few lines."""
    run = make_run()
    prepare(run, Launchers())
    for name, text in scripts.items():
        run.paths.script(name).write_text(f"#!/bin/bash\nset -e\n{text}\n")
    return run


def states(run: Run) -> dict[str, str]:
    return {job.stage: state.state for job, state in ProcessLauncher().states(run, run.journal.jobs()).items()}


def ended(run: Run) -> bool:
    return not any(JobState(state).active for state in states(run).values())


def alive(pid: int) -> bool:
    # a zombie waits for its parent, and does nothing any more
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_machine_has_the_accelerators_of_one_node(make_run: MakeRun) -> None:
    run = make_run(cluster__instance_type="p5.48xlarge", cluster__nodes=2)
    with pytest.raises(UserError, match=r"^cluster\.nodes: plain processes .* accelerators of 2; set it to 1"):
        ProcessLauncher().submit(run, [run.plan["train"]], {})
    assert not run.journal.jobs()


def test_scripts_run_in_order_and_a_failure_cancels_what_needs_it(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepared(
        make_run,
        env="echo env >>order",
        download="echo download >>order; env | grep ^SLURM_ && exit 9; echo out; echo err >&2",
        certify="echo certify >>order",
        dataset="echo dataset >>order; exit 3",
        train="echo train >>order",
        consolidate="echo consolidate >>order",
    )
    monkeypatch.setenv("SLURM_JOB_ID", "99")
    ProcessLauncher().submit(run, run.plan.stages[:6], {})
    wait_for(lambda: ended(run))
    assert states(run) == {
        "env": "COMPLETED",
        "download": "COMPLETED",
        "certify": "COMPLETED",
        "dataset": "FAILED",
        "train": "CANCELLED",
        "consolidate": "CANCELLED",
    }
    assert (run.paths.directory / "order").read_text().split() == ["env", "download", "certify", "dataset"]
    assert run.paths.log("download", "p2").read_text() == "out\nerr\n"


def test_an_interrupted_submission_leaves_nothing_running(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain runner that is slow to start, and Ctrl-C meanwhile, which does not reach it."""
    run = prepared(make_run)
    slow, pid_file, begin = tmp_path / "slow", tmp_path / "pid", tmp_path / "begin"
    hold = f"echo $$ >{pid_file}; while [[ ! -e {begin} ]]; do sleep 0.05; done"
    slow.write_text(f'#!/bin/bash\n{hold}; exec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))

    def interrupt() -> None:
        wait_for(lambda: pid_file.exists() and pid_file.read_text().strip())
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor() as pool:
        done = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            submit(run, Launchers(), Selection(), "process")
        done.result()
    begin.touch()
    wait_for(lambda: not alive(int(pid_file.read_text())))
    assert not run.paths.log("env", "p1").exists(), "no script was started"
    assert not Launchers().active(run)


def test_cancel_ends_every_process_also_one_in_a_session_of_its_own(make_run: MakeRun) -> None:
    run = prepared(make_run, env="setsid sleep 300 & echo $! >pid; wait")
    ProcessLauncher().submit(run, run.plan.stages[:2], {})
    pid_file = run.paths.directory / "pid"
    wait_for(lambda: pid_file.exists() and pid_file.read_text().strip())
    # the chain runner writes it after it has started the script
    wait_for(lambda: states(run) == {"env": "RUNNING", "download": "PENDING"})
    ProcessLauncher().cancel(run, run.journal.jobs())
    assert states(run) == {"env": "CANCELLED", "download": "CANCELLED"}
    assert not alive(int(pid_file.read_text()))


def test_what_a_killed_chain_runner_left_is_seen_and_can_be_stopped(make_run: MakeRun) -> None:
    run = prepared(make_run, env="echo $$ >pid; setsid sleep 300 & wait")
    ProcessLauncher().submit(run, run.plan.stages[:2], {})
    pid_file = run.paths.directory / "pid"
    wait_for(lambda: pid_file.exists() and pid_file.read_text().strip())
    # the chain runner records the script's process after it has started it
    wait_for(lambda: states(run) == {"env": "RUNNING", "download": "PENDING"})
    script = int(pid_file.read_text())
    chain_runner = int(Path(f"/proc/{script}/stat").read_text().split()[3])
    os.kill(chain_runner, signal.SIGKILL)
    assert status(run, Launchers()).stages[0].state == "running"
    with pytest.raises(UserError, match="still at work"):
        submit(run, Launchers(), Selection(), "process")
    ProcessLauncher().cancel(run, run.journal.jobs())
    assert not alive(script)
    current = status(run, Launchers())
    assert current.stages[0].state == "failed"


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "REQUEUED"])
def test_active_states(state: str) -> None:
    assert JobState(state).active
    assert JobState("A_STATE_OF_A_VERSION_TO_COME").active
    assert not JobState("COMPLETED").active


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to another user")
def test_no_process_is_ended_that_another_user_has_named(make_run: MakeRun) -> None:
    run = prepared(make_run, env="sleep 3600")
    ProcessLauncher().submit(run, run.plan.stages[:1], {})
    wait_for(lambda: states(run) == {"env": "RUNNING"})
    (state_file,) = (run.paths.directory / "processes").glob("*.json")
    os.chown(state_file, 65534, 65534)
    with pytest.raises(UserError, match=f"{state_file}: belongs to another user"):
        ProcessLauncher().cancel(run, run.journal.jobs())
    assert states(run) == {"env": "RUNNING"}
    os.chown(state_file, 0, 0)
    ProcessLauncher().cancel(run, run.journal.jobs())
    wait_for(lambda: ended(run))
