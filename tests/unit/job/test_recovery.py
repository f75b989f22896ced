"""What the supervisor does after an attempt at a training."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.job import growth, recovery
from hyperpod_ft.job.growth import Growth
from hyperpod_ft.job.job_host import JobHost
from hyperpod_ft.job.recovery import ContinuedBy, Decision
from hyperpod_ft.runs import attempts
from hyperpod_ft.runs.attempts import Attempt, NodeFailure
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.results import metrics
from tests.conftest import MakeRun


def attempt(**values: Any) -> Attempt:
    rank_3 = NodeFailure("node2", 3, 1, 100.0)
    return Attempt(
        **{
            "job_id": "7",
            "time": "2026-01-01T00:00:00Z",
            "status": 1,
            "recorded": False,
            "failures": (rank_3,),
            "signal": 0,
            "resumed_from": 0,
            "checkpoint": 10,
            "step": 12,
        }
        | values
    )


def crash(step: int = 5, checkpoint: int = 0, rank: int = 3) -> Attempt:
    return attempt(failures=(NodeFailure("node2", rank, 1, 100.0),), step=step, checkpoint=checkpoint)


def at_the_limit() -> Attempt:
    return attempt(signal=signal.SIGUSR1)


def decide(
    now: Attempt, earlier: Sequence[Attempt] = (), allowed: int = 3, continued_by: ContinuedBy = "Slurm"
) -> Decision:
    return recovery.decide(now, earlier, allowed, continued_by)


def test_success_and_cancellation_end_it() -> None:
    assert decide(attempt(status=0, failures=())) == Decision("end")
    assert decide(attempt(status=0, failures=(), signal=signal.SIGTERM)) == Decision("end"), "it was done before"
    assert decide(attempt(signal=signal.SIGTERM)) == Decision("end", 143)


def test_the_record_ends_the_job_with_success_whatever_the_processes_did() -> None:
    echo = (NodeFailure("node1", 0, 2, 1.0),)
    for status, received in ((1, 0), (143, signal.SIGTERM), (138, signal.SIGUSR1), (137, 0), (2, 0)):
        assert decide(attempt(status=status, recorded=True, signal=received, failures=echo)) == Decision("end")


def test_a_crash_is_retried_as_often_as_the_run_file_says() -> None:
    first = decide(attempt())
    assert (first.action, first.message) == ("retry", "rank 3: exit 1 at step 12; restart 1 of 3")
    assert decide(attempt(), [crash(), crash(7)]).number == 3
    spent = decide(attempt(), [crash(), crash(7), crash(9)])
    assert spent == Decision("end", 1, "rank 3: exit 1 at step 12 after 3 restarts (cluster.max_restarts: 3)")
    assert decide(attempt(), allowed=0).action == "end"
    limits = [at_the_limit()] * 5
    assert decide(attempt(), limits).number == 1, "requeues at the time limit are not crashes"


def test_a_crash_that_repeats_itself_is_not_retried() -> None:
    again = decide(attempt(), [crash(12, 10)])
    assert (again.action, again.status) == ("end", 1)
    assert "rank 3: exit 1 at step 12" in again.message
    assert decide(attempt(checkpoint=11), [crash(12, 10)]).action == "retry", "a checkpoint more"
    assert decide(attempt(step=13), [crash(12, 10)]).action == "retry", "further than the last time"
    assert decide(attempt(), [crash(12, 10, rank=0)]).action == "retry", (
        "another rank: it may have died before it began"
    )


def test_a_users_error_is_not_retried() -> None:
    user_error = (NodeFailure("node1", 0, 2, 100.9), NodeFailure("node2", 3, 1, 100.1))
    assert decide(attempt(failures=user_error)) == Decision("end", 2), "peers of rank 0 echo it as 1"
    assert decide(attempt(failures=(NodeFailure("node1", None, 2, 1.0),))) == Decision("end", 2), "an unfit node"
    assert decide(attempt(status=2, failures=())) == Decision("end", 2)
    assert decide(attempt(failures=user_error, signal=signal.SIGUSR1)) == Decision("end", 2)


def test_a_failure_without_a_reason_is_requeued() -> None:
    lost = decide(attempt(failures=()), [crash(12, 10)])
    assert (lost.action, lost.number) == ("requeue", 2)
    assert lost.message.startswith("exit 1 at step 12, ")
    for other in ("next job", "nothing"):
        assert decide(attempt(failures=()), continued_by=other).action == "retry"


def test_a_hang_counts_as_a_crash_of_the_rank_that_is_named() -> None:
    stopped = NodeFailure("node4", 7, 137, 101.0, "in step 13: its process is stopped")
    killed = NodeFailure("node2", 3, 137, 100.0)
    hung = attempt(failures=(killed, stopped))
    assert hung.cause == "crash"
    named = "rank 7 on node4 hangs in step 13: its process is stopped"
    assert decide(hung) == Decision("retry", message=f"{named}; restart 1 of 3", number=1)
    assert decide(hung, [hung]).message == f"{named}, same as the last crash, with no new checkpoint since"
    user_error = NodeFailure("node1", 0, 2, 102.0)
    assert decide(attempt(failures=(stopped, user_error))) == Decision("end", 2)
    # the node's processes may hang for ever
    assert decide(attempt(failures=(stopped,), left=True)).action == "requeue"
    assert decide(attempt(failures=(stopped,), left=True), continued_by="nothing").action == "retry"


def test_the_notice_of_the_time_limit_requeues_while_there_is_progress() -> None:
    notice = decide(attempt(signal=signal.SIGUSR1, failures=(NodeFailure("node1", 0, 138, 1.0),)), [crash()] * 9)
    assert notice.action == "requeue" and at_the_limit().cause == "time limit"
    assert "from step 10" in notice.message
    only_the_ranks_got_it = attempt(failures=(NodeFailure("node1", 0, 138, 1.0),))
    assert decide(only_the_ranks_got_it).action == "requeue"
    stuck = decide(attempt(signal=signal.SIGUSR1, resumed_from=10))
    assert (stuck.action, stuck.status) == ("end", 2)
    assert "has not saved a checkpoint" in stuck.message and "save_every_steps" in stuck.message
    no_step = decide(attempt(signal=signal.SIGUSR1, resumed_from=10, step=10))
    assert "has not completed a step; raise the limit" in no_step.message and "save_every" not in no_step.message
    measuring = decide(attempt(signal=signal.SIGUSR1, resumed_from=0, checkpoint=0, step=0, measured=True))
    assert measuring.action == "requeue" and "measures the rest of the reference" in measuring.message
    assert stuck.message.startswith("cluster.time_limit: ")
    assert decide(at_the_limit(), continued_by="nothing") == Decision("end", 138)
    left = decide(at_the_limit(), continued_by="next job")
    assert (left.action, left.status) == ("leave", 138) and "the next job resumes from step 10" in left.message


def test_a_job_that_saved_for_more_nodes_is_requeued() -> None:
    saved = attempt(signal=signal.SIGUSR1, failures=(NodeFailure("node1", 0, 138, 1.0),), grows=True)
    decision = decide(saved, [crash()] * 9)
    assert (decision.action, saved.cause, saved.reason) == ("requeue", "more nodes", "more nodes")
    assert decision.message == "nodes are idle again; the job is requeued and resumes from step 10"
    assert attempts.describe([saved, at_the_limit()], 3) == (
        "continued once after its time limit, continued once on more nodes"
    )
    crashed = attempt(grows=True)
    assert crashed.cause == "crash" and decide(crashed).action == "retry", "before it could save"


def test_more_nodes_are_asked_for_after_a_checkpoint(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "_EVERY_SECONDS", 0.0)
    wanted = make_run(cluster__nodes=2, cluster__min_nodes=1, training__gradient_accumulation_steps=2)
    run, idle = wanted.on_nodes(1), 1
    monkeypatch.setattr(JobHost, "idle_nodes", lambda _: idle)
    assert run.config.training.gradient_accumulation_steps == 4 and run.paths.directory == wanted.paths.directory
    looking, complete = Growth(run, JobHost("a"), []), Growth(wanted, JobHost("a"), [])
    assert not looking.begins(), "no checkpoint yet"
    run.paths.checkpoint(10).mkdir(parents=True)
    assert not complete.begins(), "it has all"
    idle = 0
    assert not looking.begins() and not looking.is_due
    idle = 1
    assert looking.begins() and looking.is_due
    assert not looking.begins(), "once"
    saved = attempt(signal=signal.SIGUSR1, failures=(NodeFailure("node1", 0, 138, 1.0),), grows=True, nodes=1)
    again, grown = Growth(run, JobHost("a"), [saved]), Growth(run, JobHost("a", nodes=2), [saved])
    run.paths.checkpoint(20).mkdir()
    assert not again.begins(), "it was requeued for more nodes, and did not get them"
    assert grown.begins(), "it got some, but not all"


def test_pauses_grow() -> None:
    assert [recovery.pause_seconds(number, True) for number in (1, 2, 3, 9, 60)] == [15, 30, 60, 300, 300]
    assert [recovery.pause_seconds(number, False) for number in (1, 2, 3)] == [1, 2, 4]


def test_description() -> None:
    limit = at_the_limit()
    assert attempts.describe([], 3) == ""
    assert attempts.describe([crash(), limit], 3) == (
        "restart 1 of 3 (rank 3: exit 1 at step 5), continued once after its time limit"
    )
    assert attempts.describe([limit, limit], 3) == "continued 2 times after its time limit"


def test_restarts_of_all_jobs_of_a_submission(make_run: MakeRun) -> None:
    """A training job that continues another has its name and its restarts, but one budget with it."""
    run = make_run()
    first, second = "2026-01-01T00:00:00Z", "2026-01-01T00:00:01Z"
    for job_id, submitted in (("train-1", first), ("train-2", second), ("train-3", second)):
        run.journal.add_job(Job("train", job_id, "sagemaker", submitted))
        attempts.add(run.paths, "train", attempt(job_id=job_id))
    attempts.add(run.paths, "train", attempt(job_id="manual"))

    def found(job_id: str) -> list[str]:
        return [restart.job_id for restart in attempts.of_submission(run.journal, "train", job_id)]

    assert found("train-3") == ["train-2", "train-3"]
    assert (found("train-1"), found("manual"), found("unknown")) == (["train-1"], ["manual"], [])


def test_history_and_progress_on_disk(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    assert attempts.history(run.paths, "train") == []
    assert (run.journal.last_written_step(), metrics.last_step(run.paths.metrics_path)) == (0, 0)
    (run.paths.checkpoints / "step-00000010").mkdir(parents=True)
    (run.paths.checkpoints / ".step-00000020.partial").mkdir()
    (run.paths.checkpoints / "step-00000030.copy").mkdir()
    run.paths.metrics_path.write_text('{"step": 11}\n{"step": 12}\n{"st')
    assert (run.journal.last_written_step(), metrics.last_step(run.paths.metrics_path)) == (10, 12)
    for _ in range(2):
        attempts.add(run.paths, "train", attempt())
    assert [restart.reason for restart in attempts.history(run.paths, "train")] == ["rank 3: exit 1 at step 12"] * 2

    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "node2")
    recovery.report_failure(3, 1, 5.0)  # no supervisor
    monkeypatch.setenv(recovery.ATTEMPT_DIRECTORY, str(tmp_path))
    recovery.report_failure(3, 1, 5.0)
    assert recovery.failures(tmp_path) == (NodeFailure("node2", 3, 1, 5.0),)


def test_statuses_above_128_that_are_not_signals_are_numbers() -> None:
    assert attempt(failures=(NodeFailure("node1", 3, 255, 1.0),)).reason == "rank 3: exit 255 at step 12"
    assert attempt(failures=(NodeFailure("node1", 3, 137, 1.0),)).reason == "rank 3: SIGKILL at step 12"


def test_a_users_error_outranks_an_earlier_failure_on_another_nodes_clock() -> None:
    behind = (NodeFailure("node1", 0, 2, 100.0), NodeFailure("node2", 3, 1, 95.0))
    assert decide(attempt(failures=behind)) == Decision("end", 2)


def test_damaged_files_are_ignored(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    run.paths.directory.mkdir(parents=True)
    (tmp_path / "failure-0-node1.json").write_text('{"node": ')
    (tmp_path / "failure-0-node2.json").write_text('{"node": "node2", "rank": 1, "status": 9, "time": 1.0}')
    assert [failure.node for failure in recovery.failures(tmp_path)] == ["node2"]
    run.paths.restarts_path("train").parent.mkdir()
    run.paths.restarts_path("train").write_text('[{"job_id": "7"}]')
    assert attempts.history(run.paths, "train") == []
    run.paths.metrics_path.write_bytes(b'{"step": 7}\n\xff\xfe{"step"')
    assert metrics.last_step(run.paths.metrics_path) == 7


def test_only_the_last_step_of_a_job_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(recovery.ATTEMPT_DIRECTORY, str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for step in (0, 1):
        monkeypatch.setenv("SLURM_STEP_ID", str(step))
        recovery.report_failure(step, 1, 1.0)
    assert [failure.rank for failure in recovery.failures(tmp_path)] == [1]


def test_an_earlier_job_of_the_same_id_is_forgotten(make_run: MakeRun) -> None:
    run = make_run()
    for job_id in ("manual", "8"):
        attempts.add(run.paths, "train", attempt(job_id=job_id))
    attempts.forget(run.paths, "train", "manual")
    assert [restart.job_id for restart in attempts.history(run.paths, "train")] == ["8"]


def test_what_is_measured_of_the_reference_is_counted(make_run: MakeRun) -> None:
    run = make_run()
    assert run.journal.references_measured() == 0
    run.paths.reference_log_probabilities.mkdir(parents=True)
    run.paths.reference_count.write_text("12\n")
    assert run.journal.references_measured() == 12
    run.paths.reference_count.write_text("")
    assert run.journal.references_measured() == 0


def test_the_newest_checkpoint_is_the_one_written_last(make_run: MakeRun) -> None:
    run = make_run()
    assert run.journal.last_written_step() == 0
    for age, step in ((1, 350), (2, 400)):  # 400 was damaged: training resumed before it
        directory = run.paths.checkpoints / f"step-{step:08d}"
        directory.mkdir(parents=True)
        os.utime(directory, (1_000_000 - age, 1_000_000 - age))
    assert run.journal.last_written_step() == 350
