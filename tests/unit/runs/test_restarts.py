"""What follows an attempt at a training that was cut short."""

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.runs import restarts
from hyperpod_ft.runs.restarts import Decision, Ending, Outcome, Restart, endings
from hyperpod_ft.runs.run import Run

MakeRun = Callable[..., Run]


def attempt(**values: Any) -> Outcome:
    rank_3 = Ending("node2", 3, 1, 100.0)
    return Outcome(
        **{"status": 1, "endings": (rank_3,), "told": 0, "begun_at": 0, "checkpoint": 10, "step": 12} | values
    )


def crash(step: int = 5, checkpoint: int = 0, rank: int = 3) -> Restart:
    return Restart("7", "2026-01-01T00:00:00Z", "crash", f"rank {rank}: exit 1 at step {step}", step, checkpoint)


def decide(now: Outcome, earlier: Sequence[Restart] = (), allowed: int = 3, requeues: bool = True) -> Decision:
    return restarts.decide(now, earlier, allowed, requeues)


def test_success_and_cancellation_end_it() -> None:
    assert decide(attempt(status=0, endings=())) == Decision("end")
    assert decide(attempt(status=0, endings=(), told=signal.SIGTERM)) == Decision("end"), "it was done before"
    assert decide(attempt(told=signal.SIGTERM)) == Decision("end", 143)


def test_a_crash_is_retried_as_often_as_the_run_file_says() -> None:
    first = decide(attempt())
    assert (first.what, first.words) == ("retry", "rank 3: exit 1 at step 12; restart 1 of 3")
    assert decide(attempt(), [crash(), crash(7)]).number == 3
    spent = decide(attempt(), [crash(), crash(7), crash(9)])
    assert spent == Decision("end", 1, "rank 3: exit 1 at step 12 after 3 restarts (cluster.max_restarts: 3)")
    assert decide(attempt(), allowed=0).what == "end"
    limits = [Restart("7", "", "time limit", "time limit", 1, 1)] * 5
    assert decide(attempt(), limits).number == 1, "time limits are no crashes"


def test_a_crash_that_repeats_itself_is_not_retried() -> None:
    again = decide(attempt(), [crash(12, 10)])
    assert (again.what, again.status) == ("end", 1)
    assert "as the last time" in again.words
    assert decide(attempt(checkpoint=11), [crash(12, 10)]).what == "retry", "a checkpoint more"
    assert decide(attempt(step=13), [crash(12, 10)]).what == "retry", "further than the last time"
    assert decide(attempt(), [crash(12, 10, rank=0)]).what == "retry", "another rank: it may have died before it began"


def test_what_a_user_has_to_mend_is_not_retried() -> None:
    told_first = (Ending("node1", 0, 2, 100.9), Ending("node2", 3, 1, 100.1))
    assert decide(attempt(endings=told_first)) == Decision("end", 2), "peers that lost rank 0 say 1 within the second"
    assert decide(attempt(endings=(Ending("node1", None, 2, 1.0),))) == Decision("end", 2), "a node that is not fit"
    assert decide(attempt(status=2, endings=())) == Decision("end", 2)
    assert decide(attempt(endings=told_first, told=signal.SIGUSR1)) == Decision("end", 2)


def test_signals_are_named() -> None:
    assert "rank 3: SIGKILL at step 12" in decide(attempt(endings=(Ending("node2", 3, 137, 1.0),))).words


def test_a_step_that_nobody_explains_goes_back_to_slurm() -> None:
    lost = decide(attempt(endings=()), [crash(12, 10)])
    assert (lost.what, lost.number) == ("requeue", 2)
    assert "no rank said why" in lost.words
    assert decide(attempt(endings=()), requeues=False).what == "retry"


def test_the_notice_of_the_time_limit_requeues_while_there_is_progress() -> None:
    notice = decide(attempt(told=signal.SIGUSR1, endings=(Ending("node1", 0, 138, 1.0),)), [crash()] * 9)
    assert (notice.what, notice.cause) == ("requeue", "time limit")
    assert "goes on from step 10" in notice.words
    assert decide(attempt(endings=(Ending("node1", 0, 138, 1.0),))).what == "requeue", "only the ranks were told"
    stuck = decide(attempt(told=signal.SIGUSR1, begun_at=10))
    assert (stuck.what, stuck.status) == ("end", 2)
    assert stuck.words.startswith("cluster.time_limit: ")
    assert decide(attempt(told=signal.SIGUSR1), requeues=False) == Decision("end", 138)


def test_pauses_grow() -> None:
    assert [restarts.pause_seconds(number, True) for number in (1, 2, 3, 9, 60)] == [15, 30, 60, 300, 300]
    assert [restarts.pause_seconds(number, False) for number in (1, 2, 3)] == [1, 2, 4]


def test_words() -> None:
    limit = Restart("7", "", "time limit", "time limit", 1, 1)
    assert restarts.describe([], 3) == ""
    assert restarts.describe([crash(), limit], 3) == (
        "restart 1 of 3 (rank 3: exit 1 at step 5), requeued once at its time limit"
    )
    assert restarts.describe([limit, limit], 3) == "requeued 2 times at its time limit"


def test_history_and_progress_on_disk(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    assert restarts.history(run, "train") == []
    assert (restarts.newest_checkpoint(run), restarts.last_step(run)) == (0, 0)
    (run.checkpoints / "step-00000010").mkdir(parents=True)
    (run.checkpoints / ".step-00000020.partial").mkdir()
    (run.checkpoints / "step-00000030.copy").mkdir()
    run.metrics.write_text('{"step": 11}\n{"step": 12}\n{"st')
    assert (restarts.newest_checkpoint(run), restarts.last_step(run)) == (10, 12)
    for _ in range(2):
        restarts.remember(run, "train", "7", attempt(), decide(attempt()))
    assert [restart.reason for restart in restarts.history(run, "train")] == ["rank 3: exit 1 at step 12"] * 2

    monkeypatch.setenv("SLURMD_NODENAME", "node2")
    Ending.leave_here(3, 1, 5.0)  # nobody asked
    monkeypatch.setenv(restarts.ATTEMPT_DIRECTORY, str(tmp_path))
    Ending.leave_here(3, 1, 5.0)
    assert restarts.endings(tmp_path) == (Ending("node2", 3, 1, 5.0),)


def test_statuses_that_are_no_signal_are_told_as_they_are() -> None:
    assert attempt(endings=(Ending("node1", 3, 255, 1.0),)).reason == "rank 3: exit 255 at step 12"
    assert attempt(endings=(Ending("node1", 3, 137, 1.0),)).reason == "rank 3: SIGKILL at step 12"


def test_a_users_error_outranks_what_another_nodes_clock_says_came_first() -> None:
    behind = (Ending("node1", 0, 2, 100.0), Ending("node2", 3, 1, 95.0))
    assert decide(attempt(endings=behind)) == Decision("end", 2)


def test_damaged_files_count_for_nothing(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    run.directory.mkdir(parents=True)
    (tmp_path / "ending-0-node1.json").write_text('{"node": ')
    Ending("node2", 1, 9, 1.0).leave(tmp_path)
    assert [ending.node for ending in endings(tmp_path)] == ["node2"]
    run.metrics.write_bytes(b'{"step": 7}\n\xff\xfe{"step"')
    assert restarts.last_step(run) == 7


def test_only_the_last_step_of_a_job_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (0, 1):
        monkeypatch.setenv("SLURM_STEP_ID", str(step))
        Ending("node1", step, 1, 1.0).leave(tmp_path)
    assert [ending.rank for ending in endings(tmp_path)] == [1]


def test_an_earlier_job_of_the_same_id_is_forgotten(make_run: MakeRun) -> None:
    run = make_run()
    for job_id in ("manual", "8"):
        restarts.remember(run, "train", job_id, attempt(), Decision("retry", number=1))
    restarts.forget(run, "train", "manual")
    assert [restart.job_id for restart in restarts.history(run, "train")] == ["8"]


def test_the_newest_checkpoint_is_the_one_written_last(make_run: MakeRun) -> None:
    run = make_run()
    assert restarts.newest_checkpoint(run) == 0
    for age, step in ((1, 350), (2, 400)):  # 400 was damaged: training went on before it
        directory = run.checkpoints / f"step-{step:08d}"
        directory.mkdir(parents=True)
        os.utime(directory, (1_000_000 - age, 1_000_000 - age))
    assert restarts.newest_checkpoint(run) == 350
