"""The supervisor of a training job, around commands that stand in for srun and its ranks."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hyperpod_ft import publish
from hyperpod_ft.launch.render import Installation, render
from hyperpod_ft.processes import children
from hyperpod_ft.runs import attempts
from hyperpod_ft.runs.attempts import Attempt
from hyperpod_ft.runs.records import Record, image_state, utc_now
from hyperpod_ft.runs.run import Run
from tests.conftest import MakeRun
from tests.programs import Started, start_module
from tests.waiting import wait_for

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def run(make_run: MakeRun) -> Run:
    run = make_run()
    run.freeze()
    return run


# The supervisor, but it waits for less long for what outlives the stage's record, and before it asks Slurm again; and
# for longer for what ends.
IMPATIENT = """
import sys
from hyperpod_ft.job import supervisor
supervisor._RECORD_POLL_SECONDS, supervisor._GRACE_SECONDS, supervisor._TERMINATION_SECONDS = 0.1, 1, 300
supervisor._REQUEUE_RETRY_SECONDS = 0.1
sys.exit(supervisor.main())
"""


def start(run: Run, command: str, program: str = "", **environment: str) -> Started:
    supervisor = ["-c", program] if program else ["hyperpod_ft.job.supervisor"]
    given = {**os.environ, "HYPERPOD_FT_JOB_ID": "7", "PYTHONPATH": str(REPOSITORY)} | environment
    arguments = ["train", str(run.paths.directory), "bash", "-c", command]
    return start_module(run.paths.directory, given, *supervisor, *arguments)


def finish(process: Started) -> tuple[int | None, str]:
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def scontrol(directory: Path, text: str) -> dict[str, str]:
    """A stand-in for the program; returns the environment that has it, and looks like a job's."""
    (directory / "scontrol").write_text(f"#!/bin/bash\n{text}\n")
    (directory / "scontrol").chmod(0o755)
    return {"PATH": f"{directory}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(("end", "left"), [(0, {"generate"}), (2, set()), (143, {"train", "generate"})])
def test_secrets_are_removed_when_no_job_will_read_them(run: Run, end: int, left: set[str]) -> None:
    for stage in ("train", "generate"):
        publish.write_text(run.paths.secrets(stage), "export X=1\n", mode=0o600)
    # 143: Slurm has told it to end, and may start it again
    command = {0: finished_training(run), 2: "exit 2", 143: "kill $PPID; sleep 1; exit 143"}[end]
    status, output = finish(start(run, command, IMPATIENT))
    assert (status, {path.name for path in run.paths.secrets_directory.iterdir()}) == (end, left), output


# The supervisor, on a volume that is full.
ON_A_FULL_VOLUME = """
import errno, os, sys
from hyperpod_ft.job import supervisor
def full(run, *_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "attempts")
supervisor._Running.attempt = full
sys.exit(supervisor.main())
"""


def test_a_full_volume_is_one_line(run: Run) -> None:
    status, output = finish(start(run, "true", program=ON_A_FULL_VOLUME))
    line = "error: train: attempts: No space left on device; free or repair the volume, then resume"
    assert (status, output) == (2, f"{line}\n")
    assert run.paths.exit_marker("train", "7").read_text() == "2\n"


def test_an_image_that_was_replaced_trains_nothing(make_run: MakeRun, tmp_path: Path) -> None:
    """The environment was made for the other one. What does not see the file, as a job in it, does not judge it."""
    image, other = tmp_path / "one.sqsh", tmp_path / "other.sqsh"
    image.write_text("1")
    run = make_run(env={"container": str(image)})
    run.freeze()
    facts = {"image": image_state(image)}
    Record("env", run.plan["env"].fingerprint, {}, (), facts, utc_now(), 0.0, "", "").write(
        run.paths.record_path("env")
    )
    assert run.journal.is_done("env")
    other.write_text("2")
    other.replace(image)
    status, output = finish(start(run, "echo trained"))
    assert status == 2 and len(output.splitlines()) == 1
    assert f"stage env: {image} was replaced; run: hyperpod-ft resume " in output
    image.unlink()
    assert run.journal.is_done("env")


def test_a_volume_that_takes_no_exit_status_does_not_change_it(run: Run) -> None:
    status, output = finish(start(run, f"rm -rf exits; touch exits; {finished_training(run)}"))
    assert status == 0, output


def finished_training(run: Run) -> str:
    """A command that does what rank 0 does at the end of a training: it writes the stage's record."""
    record = Record("train", run.plan["train"].fingerprint, {}, (), {}, utc_now(), 0.0, "", "7")
    record.write(run.paths.directory / "record")
    return f"mkdir -p records && cp record records/partial && mv records/partial {run.paths.record_path('train')}"


def test_a_record_that_was_seen_counts_when_a_forced_submission_removes_it(run: Run, tmp_path: Path) -> None:
    slurm = scontrol(tmp_path, f"touch {shlex.quote(str(tmp_path / 'asked'))}")
    remove = f"trap 'rm {shlex.quote(str(run.paths.record_path('train')))}; exit 1' TERM"
    process = start(run, f"{finished_training(run)}; {remove}; while :; do sleep 0.2; done", program=IMPATIENT, **slurm)
    assert finish(process)[0] == 0
    assert not run.paths.record_path("train").exists() and not (tmp_path / "asked").exists()
    assert attempts.history(run.paths, "train") == []


def test_a_peer_that_fails_after_the_record_is_written_is_not_a_crash(run: Run, tmp_path: Path) -> None:
    slurm = scontrol(tmp_path, f"touch {shlex.quote(str(tmp_path / 'asked'))}")
    assert finish(start(run, f"{finished_training(run)}; exit 2", **slurm))[0] == 0
    assert attempts.history(run.paths, "train") == [] and not (tmp_path / "asked").exists()


def test_processes_that_outlive_a_hang_are_not_waited_for(run: Run, tmp_path: Path) -> None:
    """As a node may not answer to srun either, Slurm is asked to start the job again."""
    slurm = scontrol(tmp_path, f"touch {shlex.quote(str(tmp_path / 'asked'))}; kill $PPID")
    failure = '{"node": "node2", "rank": 1, "status": 137, "time": 1.0, "hang": "in step 4: its process is stopped"}'
    report = f"echo {shlex.quote(failure)} >$HYPERPOD_FT_ATTEMPT/failure-0-node2.json"
    hangs = f"trap '' TERM; {report}; while :; do sleep 0.1; done"
    impatient = IMPATIENT.replace("0.1, 1, 300", "0.1, 0.1, 0.1")
    process = start(run, hangs, program=impatient, **slurm)
    status, output = finish(process)
    assert "rank 1 on node2 hangs in step 4: its process is stopped; restart 1 of 3" in output
    assert status == 143 and (tmp_path / "asked").exists()
    (restart,) = attempts.history(run.paths, "train")
    assert restart.left


def test_what_is_done_is_not_started_again(run: Run) -> None:
    subprocess.run(["bash", "-c", finished_training(run)], cwd=run.paths.directory, check=True)
    status, output = finish(start(run, "touch started"))
    assert (status, (run.paths.directory / "started").exists()) == (0, False)
    assert "already done" in output


# The supervisor, with seconds for its own SIGTERM after an end of the command, and after one by SIGTERM.
SIGNALLED_LATE = """
import sys
from hyperpod_ft.job import supervisor
supervisor._SIGNAL_DELIVERY_SECONDS, supervisor._TERMINATION_DELIVERY_SECONDS = {}, {}
sys.exit(supervisor.main())
"""


@pytest.mark.parametrize(("end", "seconds"), [(1, (300, 0)), (143, (0, 300))])
def test_a_cancelled_job_is_not_tried_again(run: Run, end: int, seconds: tuple[int, int]) -> None:
    command = f"trap 'exit {end}' TERM; touch started; while :; do sleep 0.1; done"
    process = start(run, command, program=SIGNALLED_LATE.format(*seconds))
    wait_for((run.paths.directory / "started").exists)
    subprocess.run(["pkill", "-TERM", "-P", str(process.pid)], check=True)  # Slurm signals both, in any order
    wait_for(lambda: not children(process.pid))
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 143
    assert run.paths.exit_marker("train", "7").read_text() == "143\n"
    assert attempts.history(run.paths, "train") == []


# The supervisor, with a pause that lasts until it has received something.
WITH_A_LONG_PAUSE = """
import sys
from hyperpod_ft.job import recovery, supervisor
recovery.pause_seconds = lambda *_: 600
sys.exit(supervisor.main())
"""


def test_the_notice_during_a_pause_has_the_job_requeued(run: Run, tmp_path: Path) -> None:
    marker = run.paths.exit_marker("train", "7")
    marker.parent.mkdir()
    marker.write_text("1\n")
    slurm = scontrol(tmp_path, f'echo "$@" >part && mv part {shlex.quote(str(tmp_path / "asked"))}')
    rank = '{"node": "a", "rank": 0, "status": 1, "time": 1}'
    crash = f"echo {shlex.quote(rank)} >$HYPERPOD_FT_ATTEMPT/failure-0-a.json; exit 1"
    process = start(run, f"mkdir -p checkpoints/step-00000004; {crash}", program=WITH_A_LONG_PAUSE, **slurm)
    process.wait_for("restart 1 of 3 in 600 s")
    process.send_signal(signal.SIGUSR1)
    wait_for((tmp_path / "asked").exists)
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    process.send_signal(signal.SIGTERM)  # as Slurm does then
    assert finish(process)[0] == 143
    assert attempts.history(run.paths, "train")[-1].cause == "time limit"
    assert not marker.exists(), "it has not ended"


def test_ranks_that_hang_do_not_keep_the_job_from_being_requeued(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(cluster__time_limit="00:00:10")  # a notice of 1 s
    run.freeze()
    slurm = scontrol(tmp_path, f"touch {shlex.quote(str(tmp_path / 'asked'))}")
    save = "mkdir -p checkpoints/step-00000004"
    process = start(run, f"trap '' USR1; {save}; touch started; exec sleep 3600", **slurm)
    wait_for((run.paths.directory / "started").exists)
    process.send_signal(signal.SIGUSR1)
    wait_for((tmp_path / "asked").exists)
    # not the stand-in for scontrol, which may still run: the job was requeued
    kill = ["pkill", "-KILL", "-P", str(process.pid), "sleep"]
    wait_for(lambda: subprocess.run(kill, check=False).returncode == 0, what="it does not sleep yet")
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 143


def test_a_slurm_that_refuses_to_requeue_is_an_error(run: Run, tmp_path: Path) -> None:
    slurm = scontrol(tmp_path, "echo 'slurm_requeue error: Job requeue is disabled' >&2; exit 1")
    status, output = finish(start(run, "mkdir -p checkpoints/step-00000004; exit 9", **slurm))
    assert status == 2
    assert "error: train: scontrol requeue 7: " in output and "hyperpod-ft resume" in output
    assert run.paths.exit_marker("train", "7").read_text() == "2\n"


@pytest.mark.parametrize(
    "message", ["Unable to contact slurm controller (connect failure)", "Unexpected message received for job 7"]
)
def test_a_slurm_that_is_away_for_a_moment_is_asked_again(run: Run, tmp_path: Path, message: str) -> None:
    asked = tmp_path / "asked"
    away = f"[[ -e {asked} ]] || {{ touch {asked}; echo '{message}' >&2; exit 1; }}; kill $PPID"
    status, output = finish(
        start(run, "mkdir -p checkpoints/step-00000004; exit 9", program=IMPATIENT, **scontrol(tmp_path, away))
    )
    assert status == 143 and "scontrol requeue" not in output
    assert asked.exists() and not run.paths.exit_marker("train", "7").exists()


def test_a_job_that_slurm_believes_pending_counts_as_requeued(run: Run, tmp_path: Path) -> None:
    """slurmctld came back with an older state: it starts the job again by itself."""
    slurm = scontrol(tmp_path, "kill $PPID; echo 'Job is pending execution for job 7' >&2; exit 1")
    status, output = finish(start(run, "exit 9", **slurm))
    assert status == 143 and "error" not in output
    assert not run.paths.exit_marker("train", "7").exists()


# The supervisor, and a process of the attempt before it, which makes the directory of reports again.
WITH_A_LATE_REPORT = """
import sys
from hyperpod_ft.job import supervisor
remove = supervisor.publish.remove
def removed(path):
    remove(path)
    if path.parent.name == "attempts":
        path.mkdir(parents=True)
supervisor.publish.remove = removed
sys.exit(supervisor.main())
"""


def test_a_late_report_of_an_earlier_attempt_does_not_end_this_one(run: Run) -> None:
    assert finish(start(run, "true", program=WITH_A_LATE_REPORT)) == (0, "")


@pytest.mark.parametrize("hyperpod", [True, False])
def test_auto_resume_is_asked_for_where_hyperpod_is_and_nowhere_else(
    make_run: MakeRun, tmp_path: Path, hyperpod: bool
) -> None:
    """HyperPod's directory is elsewhere here; srun and scontrol are stand-ins."""
    run = make_run(env__python=sys.executable)
    run.freeze()
    directory = tmp_path / "sagemaker_cluster"
    if hyperpod:
        directory.mkdir()
    text = render(run, Installation(Path(sys.executable), REPOSITORY))["train"]
    assert "/opt/sagemaker_cluster" in text
    script = tmp_path / "train.sbatch"
    script.write_text(text.replace("/opt/sagemaker_cluster", str(directory)))
    slurm = scontrol(tmp_path, "echo node1 NodeAddr=127.0.0.1")
    (tmp_path / "srun").write_text('#!/bin/bash\nprintf "%s\\n" "$@" >srun-arguments\n')
    (tmp_path / "srun").chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node1", "SLURM_CPUS_ON_NODE": "2"}
    subprocess.run(["bash", script], env=os.environ | slurm | job, check=True, timeout=300)
    arguments = (run.paths.directory / "srun-arguments").read_text().splitlines()
    assert ("--auto-resume=1" in arguments) == hyperpod
    assert ("--cpus-per-task=2" in arguments) != hyperpod
    assert ("--immediate=600" in arguments) != hyperpod
    assert "--nodes=1" in arguments


# What torchrun does on a node: after each failure it waits for a word, and ends without one.
HEARING = """
fail() { printf '{"node": "a", "rank": 0, "status": %s, "time": 1}' $1 >$HYPERPOD_FT_ATTEMPT/failure-$2-a.json; }
hear() {
  while read -r word; do echo "heard $word"; [[ $word == begin* ]] && return; done
  echo "heard no more"; exit 9
}
"""


def test_ranks_that_failed_are_started_again_by_the_command_that_still_runs(run: Run) -> None:
    once = "mkdir -p checkpoints/step-00000004; fail 137 0; hear; mkdir checkpoints/step-00000008"
    again = f"[[ -z $(ls $HYPERPOD_FT_ATTEMPT) ]] && fail 7 1; hear; {finished_training(run)}"
    status, output = finish(start(run, f"{HEARING} echo started; {once}; {again}"))
    assert status == 0, output
    said = ["started", "heard end", "heard begin 1", "heard end", "heard begin 2"]
    assert [line for line in output.splitlines() if line.startswith(("started", "heard"))] == said
    history = attempts.history(run.paths, "train")
    assert [(end.status, end.reason, end.checkpoint) for end in history] == [
        (137, "rank 0: SIGKILL at step 0", 4),
        (7, "rank 0: exit 7 at step 0", 8),
    ]


def test_the_command_ends_after_a_second_crash_without_a_new_checkpoint(run: Run) -> None:
    """HyperPod's plugin looks at the nodes when a job step has ended."""
    twice = "[[ -e once ]] || { touch once; fail 1 0; hear; }; fail 1 1; hear"
    status, output = finish(start(run, f"{HEARING} {twice}"))
    assert status == 1 and "same as the last crash" in output
    assert [line for line in output.splitlines() if line.startswith("heard")] == [
        *("heard end", "heard begin 1", "heard no more")
    ]


def test_a_job_that_has_failed_ends_at_once_when_it_is_cancelled(make_run: MakeRun) -> None:
    """Pyxis may take minutes to end a step, and Slurm kills what is still there half a minute after SIGTERM."""
    run = make_run(cluster__max_restarts=0)
    run.freeze()
    patient = IMPATIENT.replace("0.1, 1, 300", "0.1, 600, 600")
    process = start(run, f"{HEARING} fail 137 0; exec sleep 600", program=patient)
    process.wait_for("max_restarts: 0")
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 137
    assert run.paths.exit_marker("train", "7").read_text() == "137\n"


HOST = {"HYPERPOD_FT_HOSTS": "algo-1", "HYPERPOD_FT_HOST_NUMBER": "0", "HYPERPOD_FT_MAX_RUNTIME": "3600"}
SAVES = "mkdir -p checkpoints/step-00000004"


@pytest.mark.parametrize("failed", [2, 138])
def test_an_error_and_a_notice_end_the_command_at_once(run: Run, failed: int) -> None:
    status, output = finish(start(run, f"{HEARING} {SAVES}; fail {failed} 0; hear", **HOST))
    assert status == failed and "heard no more" in output and "heard end" not in output


def test_a_command_that_nobody_can_speak_to_ends_before_it_is_started_again(run: Run, tmp_path: Path) -> None:
    """What runs a command on the hosts of a training job does not read its own standard input."""
    (tmp_path / "on_every_host.py").write_text("import os, sys\nos.execvp(sys.argv[3], sys.argv[3:])\n")
    program = {"HYPERPOD_FT_ON_EVERY_HOST": "on_every_host", "PYTHONPATH": f"{REPOSITORY}:{tmp_path}"}
    # it outlives the pause
    once = "[[ -e once ]] || { touch once; fail 137 0; sleep 3; echo ended; exit 137; }"
    again = f"read -r -t 9 word; echo again $HYPERPOD_FT_ATTEMPT_NUMBER $word; {finished_training(run)}"
    status, output = finish(start(run, f"{HEARING} {once}; {again}", **HOST | program))
    assert status == 0, output
    said = [line for line in output.splitlines() if line.startswith(("ended", "again", "heard"))]
    assert said == ["ended", "again 1"] and [end.status for end in attempts.history(run.paths, "train")] == [137]


def test_the_last_job_before_the_limit_leaves_the_rest_to_the_next_training_job(run: Run) -> None:
    process = start(run, f"trap '{SAVES}; exit 138' USR1; touch started; while :; do sleep 0.1; done", **HOST)
    wait_for((run.paths.directory / "started").exists)
    process.send_signal(signal.SIGUSR1)
    status, output = finish(process)
    assert status == 138 and "the next job resumes from step 4" in output
    assert [(end.job_id, end.cause) for end in attempts.history(run.paths, "train")] == [("7", "time limit")]
    assert run.paths.exit_marker("train", "7").read_text() == "138\n"


def test_a_training_job_waits_for_its_checkpoint_as_long_as_its_own_notice_allows(make_run: MakeRun) -> None:
    """Of a limit of 15 s, three are notice, and two for the checkpoint; Slurm would have given 80 % of five minutes."""
    run = make_run()
    run.freeze()
    hangs = f"trap '' USR1; {SAVES}; touch started; until [[ -e over ]]; do sleep 0.1; done"
    process = start(run, hangs, **HOST | {"HYPERPOD_FT_MAX_RUNTIME": "15"})
    wait_for((run.paths.directory / "started").exists)
    noticed = time.monotonic()
    process.send_signal(signal.SIGUSR1)
    try:
        process.wait(200)
    finally:
        (run.paths.directory / "over").touch()
    assert time.monotonic() - noticed >= 2
    status, output = finish(process)
    assert status == 138 and "the next job resumes from step 4" in output


def test_a_stop_of_a_training_job_has_the_ranks_save(run: Run) -> None:
    """SageMaker signals PID 1 alone, and torchrun would kill its ranks half a minute after SIGTERM."""
    process = start(run, f"trap '{SAVES}; exit 138' USR1; touch started; while :; do sleep 0.1; done", **HOST)
    wait_for((run.paths.directory / "started").exists)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 143
    assert (run.paths.directory / "checkpoints" / "step-00000004").exists()
    assert attempts.history(run.paths, "train") == []


@pytest.mark.parametrize(("number", "on_slurm"), [(signal.SIGTERM, False), (signal.SIGUSR1, True)])
def test_ranks_that_were_not_ready_are_told_again(
    run: Run, tmp_path: Path, number: signal.Signals, on_slurm: bool
) -> None:
    """A torchrun without ranks has nobody to pass the notice on to."""
    host = scontrol(tmp_path, "kill $PPID") if on_slurm else HOST
    late = f"trap '{SAVES}; exit 138' USR1; while :; do sleep 0.1; done"
    process = start(run, f"trap '' USR1; touch started; until [[ -e ready ]]; do sleep 0.1; done; {late}", **host)
    wait_for((run.paths.directory / "started").exists)
    process.send_signal(number)
    time.sleep(0.5)  # it has been told
    (run.paths.directory / "ready").touch()
    assert finish(process)[0] == 143
    assert (run.paths.directory / "checkpoints" / "step-00000004").exists()


def test_on_another_host_of_a_training_job_it_becomes_the_command(run: Run) -> None:
    other = HOST | {"HYPERPOD_FT_HOSTS": "algo-1 algo-2", "HYPERPOD_FT_HOST_NUMBER": "1"}
    process = start(run, "echo $$; exit 2", **other)
    assert finish(process) == (2, f"{process.pid}\n")
    assert not run.paths.exit_marker("train", "7").exists()


def test_restarts_of_a_training_job_count_after_a_spot_interruption(run: Run) -> None:
    """Its name is its own, unlike the number of a job of a Slurm that was set up again."""
    attempts.add(run.paths, "train", Attempt("7", "2026-01-01T00:00:00Z", 1, False, (), 0, 0, 0, 0))
    status, output = finish(start(run, "[[ -e tried ]] || { touch tried; exit 9; }", **HOST))
    assert status == 0 and "restart 2 of 3" in output
