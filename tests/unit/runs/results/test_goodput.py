"""What the nodes of a training were held for, from attempts written by hand."""

import math
import os
import threading
import time
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_ft import heartbeat, publish
from hyperpod_ft.cli.output import show_runs
from hyperpod_ft.heartbeat import PHASES, Phase
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.status import status
from hyperpod_ft.runs import attempts
from hyperpod_ft.runs.attempts import Attempt
from hyperpod_ft.runs.job_files import NOTICE, NOTICE_STATUS, banner
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.records import unix_time
from hyperpod_ft.runs.results import holdings, usage
from hyperpod_ft.runs.results.goodput import Held, HeldAttempt, Holding, Lost, held
from hyperpod_ft.runs.run import Run
from tests.conftest import MakeRun

SECONDS = st.floats(0, 1000, allow_nan=False)
STEPS = st.integers(0, 50)


def attempt(
    began: float, reached: list[tuple[int, float]], reason: str = "", ended: float | None = None, **phases: float
) -> HeldAttempt:
    spent: dict[Phase, float] = {phase: phases[phase] for phase in PHASES if phase in phases}
    checkpoint = phases.get("checkpoint", math.inf)
    return HeldAttempt(began, sum(spent.values()), spent, reached, reason, ended, checkpoint)


def lost(found: Held) -> dict[str, float]:
    return {one.reason: pytest.approx(one.node_seconds) for one in found.lost}


def known(found: Held) -> dict[str, float]:
    return {part: seconds for part, seconds in found.parts.items() if seconds}


def test_a_crash_loses_the_steps_after_the_checkpoint_that_training_resumes_from() -> None:
    crashed = attempt(10, [(0, 0), (20, 40), (40, 80)], "rank 1: SIGKILL", 125, start=10, step=90, save=4)
    resumed = attempt(140, [(40, 0)], start=5, step=50, validation=3, save=2)
    found = held([Holding(-7, 0, 205, 1, [crashed, resumed])])
    assert known(found) == {"start": 10 + 10 + 15 + 5, "step": 80 + 50, "save": 6, "validation": 3, "end": 5}
    assert lost(found) == {"rank 1: SIGKILL": 10 + 11}, "with the time until it was noticed"
    assert (found.node_seconds, found.seconds, found.pending) == (205, 205, 7)
    assert found.goodput == 130 / 205


def test_a_damaged_checkpoint_loses_steps_of_every_attempt_that_wrote_them() -> None:
    first = attempt(0, [(0, 0), (10, 10), (20, 20)], "first", 22, step=22)
    second = attempt(30, [(20, 0), (30, 10)], "second", 41, step=11)
    third = attempt(50, [(10, 0)], step=40)
    found = held([Holding(0, 0, 90, 1, [first, second, third])])
    assert found.parts["step"] == 10 + 0 + 40 and lost(found) == {"first": 12, "second": 11}
    # of many saves, the newest are known: what was reached at an earlier one is in proportion
    crashed = attempt(0, [(0, 0), (80, 80), (90, 90)], "crash", 95, step=95)
    assert held([Holding(0, 0, 100, 1, [crashed, attempt(96, [(40, 0)], step=4)])]).parts["step"] == 44
    # before it resumes, the newest checkpoint is all that is known
    crashed = attempt(0, [(0, 0), (10, 10)], "crash", 15, step=14, checkpoint=10)
    assert lost(held([Holding(0, 0, 15, 1, [crashed])])) == {"crash": 5}


def test_a_hang_after_a_save_is_lost_though_no_step_is() -> None:
    hung = attempt(0, [(0, 0), (10, 20)], "rank 0 hangs", 90, step=85)
    assert lost(held([Holding(0, 0, 100, 1, [hung, attempt(95, [(10, 0)], step=5)])])) == {"rank 0 hangs": 70}


def test_more_nodes_weigh_more_and_waiting_in_between_is_not_held() -> None:
    """Of a job that Slurm requeues: for its time limit, or because more nodes are idle."""
    saved = attempt(5, [(0, 0), (10, 20)], "more nodes", 30, start=2, step=20, save=2)
    on_all = attempt(55, [(10, 0)], start=1, step=9)
    found = held([Holding(0, 0, 30, 1, [saved]), Holding(30, 50, 65, 3, [on_all])])
    assert known(found) == {"start": 5 + 2 + 3 * 6, "step": 20 + 3 * 9, "save": 2}
    assert lost(found) == {"more nodes": 1}
    assert (found.node_seconds, found.seconds, found.pending) == (30 + 45, 45, 20)


def test_an_attempt_that_is_killed_without_a_word() -> None:
    killed = attempt(10, [(0, 0), (5, 10)], "job 7 ended", step=18)
    found = held([Holding(0, 0, 28, 2, [killed]), Holding(60, 60, 100, 2, [attempt(70, [(5, 0)], step=30)])])
    assert known(found) == {"start": 40, "step": 20 + 60} and lost(found) == {"job 7 ended": 16}
    # in one job: what was between its last word and the next attempt is not known
    assert held([Holding(0, 0, 50, 1, [killed, attempt(40, [(5, 0)], step=10)])]).parts["other"] == 12
    # no rank began
    assert known(held([Holding(0, 0, 50, 2)])) == {"start": 100}


def test_shares_begin_with_the_goodput() -> None:
    spent: dict[str, float] = dict.fromkeys((*PHASES, "other"), 0.0)
    found = Held(spent | {"step": 1.0, "start": 4.0}, [Lost("crash", 5.0)])  # type: ignore[arg-type]
    assert found.shares() == [
        ("steps that count", 0.1),
        ("a restart (crash)", 0.5),
        ("starting and loading", 0.4),
    ]
    assert held([Holding(0, 0, 0, 1)]).goodput == 0.0


held_attempts = st.builds(
    HeldAttempt,
    began=SECONDS,
    seconds=SECONDS,
    phases=st.dictionaries(st.sampled_from(PHASES), SECONDS),
    reached=st.lists(st.tuples(STEPS, SECONDS), max_size=3),
    reason=st.just("crash"),
    ended=st.none() | SECONDS,
    checkpoint=st.just(math.inf) | STEPS,
)


@given(st.lists(st.tuples(SECONDS, SECONDS, st.integers(1, 4), st.lists(held_attempts, max_size=4)), max_size=3))
def test_all_parts_add_up_to_the_time_held_whatever_is_written(
    jobs: list[tuple[float, float, int, list[HeldAttempt]]],
) -> None:
    holdings = [Holding(0, began, began + long, nodes, of_job) for began, long, nodes, of_job in jobs]
    found = held(holdings)
    assert found.node_seconds == pytest.approx(sum(long * nodes for _, long, nodes, _ in jobs), abs=1e-6)
    assert min([*found.parts.values(), *(one.node_seconds for one in found.lost)]) >= -1e-6
    assert 0 <= found.goodput <= 1 + 1e-9


def test_a_rank_counts_its_phases_and_how_far_its_steps_were() -> None:
    before = heartbeat._own.beat
    try:
        heartbeat.beat("start")
        heartbeat.count()
        begun = time.monotonic()
        heartbeat.beat("step", 4)
        for step in range(5, 5 + 2 * heartbeat._SAVES):
            heartbeat.beat("step", step)
            with heartbeat.during("save"), heartbeat.during("save"):
                time.sleep(0.001)
        with heartbeat.during("validation"):
            found: list[dict[Phase, float]] = []
            first = time.monotonic()
            asking = threading.Thread(target=lambda: found.append(heartbeat.spent().until(time.monotonic())))
            asking.start()
            asking.join()
        assert first - begun <= sum(found[0].values()) <= time.monotonic() - begun + 1e-6
        assert found[0]["save"] >= 2 * heartbeat._SAVES * 0.001 and found[0]["validation"] > 0
        steps = [step for step, _ in heartbeat.spent().reached]
        assert steps[0] == 4 and steps[-1] == step and len(steps) == 1 + heartbeat._SAVES, "the first and the newest"
        seconds = [until for _, until in heartbeat.spent().reached]
        assert seconds == sorted(seconds) and seconds[0] == 0.0
    finally:
        heartbeat._own.beat = before


def at(second: int) -> str:
    return f"2026-01-02T03:{second // 60:02d}:{second % 60:02d}Z"


def write_attempt(
    run: Run, job_id: str, job_began: int, began: int, reached: list[tuple[int, float]], **phases: float
) -> None:
    one = replace(usage.beginning(run), job_id=job_id, started=at(began), job_began=at(job_began))
    known = replace(one, seconds=sum(phases.values()), phases=phases, reached=reached)  # type: ignore[arg-type]
    publish.write_json(run.paths.usage_path / f"{began}.json", asdict(known))


def end(run: Run, stage: str, job_id: str, second: int) -> None:
    marker = run.paths.exit_marker(stage, job_id)
    publish.write_text(marker, "1\n")
    os.utime(marker, (unix_time(at(second)),) * 2)


def test_a_run_says_what_its_nodes_were_held_for(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(**{"cluster__nodes": 2})
    run.freeze()
    assert holdings.read(run) is None and status(run, Launchers()).goodput is None
    for stage, job_id, submitted in (("dataset", "6", 0), ("train", "7", 0), ("train", "8", 200)):
        run.journal.add_job(Job(stage, job_id, "process", at(submitted)))
    end(run, "dataset", "6", 4)
    # job 7 is requeued for its time limit, and its node then dies; job 8 crashes until it is given up
    write_attempt(run, "7", 10, 15, [(0, 0.0), (10, 20.0)], start=1, step=20, save=4)
    limit = Attempt("7", at(42), NOTICE_STATUS, False, (), NOTICE, 0, 10, 10)
    attempts.add(run.paths, "train", limit)
    write_attempt(run, "7", 60, 65, [(10, 0.0), (20, 20.0)], start=5, step=30)
    found = holdings.read(run)
    assert found is not None
    assert known(found) == {"start": 2 * (5 + 1 + 5 + 5), "step": 2 * (20 + 30), "save": 8}
    assert lost(found) == {"time limit": 4} and found.pending == (10 - 4) + (60 - 42)

    # a crash: until the next attempt has begun, nothing says whether it goes on from the nodes' memory
    attempts.add(run.paths, "train", Attempt("7", at(100), 1, False, (), 0, 10, 10, 20))
    training = run.config.training.model_copy(update={"save_every_steps": 10, "memory_checkpoint_every_steps": 2})
    with_memory = replace(run, config=run.config.model_copy(update={"training": training}))
    between = holdings.read(run)
    assert between is not None and known(between)["step"] == 2 * 20, "from the volume"
    assert status(with_memory, Launchers()).goodput is status(with_memory, Launchers()).held is None
    write_attempt(run, "7", 60, 105, [], start=3)
    assert holdings.read(with_memory) is None, "it is loading"
    write_attempt(run, "7", 60, 105, [(20, 0.0)], start=3, step=1)
    resumed = holdings.read(with_memory)
    assert resumed is not None and known(resumed)["step"] == 2 * (20 + 20 + 1)
    (run.paths.usage_path / "105.json").unlink()
    publish.write_text(run.paths.cancel_marker("train", "7"), "")
    assert holdings.read(with_memory) == between
    run.paths.restarts_path("train").unlink()
    attempts.add(run.paths, "train", limit)

    write_attempt(run, "8", 210, 215, [(20, 0.0), (30, 10.0)], start=5, step=18)
    attempts.add(run.paths, "train", Attempt("8", at(240), 1, False, (), 0, 20, 30, 38))
    write_attempt(run, "8", 210, 250, [(30, 0.0)], start=5, step=7)
    end(run, "train", "8", 265)
    (run.paths.checkpoints / "step-00000030").mkdir(parents=True)
    found = holdings.read(run)
    assert found is not None
    assert found.node_seconds == 2 * found.seconds == 2 * (32 + 40 + 55)
    crash = "exit 1 at step 38, and no rank reported why"
    assert lost(found) == {"time limit": 4, "job 7 ended": 20, crash: 2 * (8 + 2), "job 8 ended": 14}
    assert known(found)["step"] == 2 * (20 + 20 + 10) and found.parts["end"] == 6
    current = status(run, Launchers())
    assert current.state == "failed" and current.goodput == found.goodput == 100 / 254 and current.held == found
    show_runs.runs(run.paths.root, [current])
    assert "39%" in capsys.readouterr().out

    # a job in which no rank began
    run.journal.add_job(Job("train", "9", "process", at(300)))
    log = run.paths.log("train", "9")
    publish.write_text(log, f"{banner('train', '9')} on a, {at(310)}\n")
    end(run, "train", "9", 320)
    after = holdings.read(run)
    assert after is not None and after.parts["start"] == found.parts["start"] + 20 and after.seconds == 137
