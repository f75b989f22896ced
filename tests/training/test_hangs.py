"""Trainings whose ranks hang, under the supervisor: they are found, named, and started again."""

import io
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from hyperpod_ft.job import supervisor
from hyperpod_ft.job.job_host import this_host
from hyperpod_ft.job.watch import LIMIT
from hyperpod_ft.runs import attempts, job_files
from hyperpod_ft.runs.run import Run
from tests.training.conftest import Jobs, MakeRun, metrics
from tests.training.test_restart import LAYOUT, TWO_RANKS
from tests.unit import tiny_tokenizer

pytestmark = pytest.mark.training


class Attempt:
    """What the supervisor uses of subprocess.Popen, for a job that is forked."""

    def __init__(self, jobs: Jobs, run: Run) -> None:
        self.job = jobs.start_train(run)
        self.stdin = io.BytesIO()  # it hears nothing: a hang ends its job step

    def poll(self) -> int | None:
        return self.job.process.poll()

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, seconds: float) -> None:
        self.job.process.wait(seconds)

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.job.process.pid, number)


class ForkingSignals(supervisor.Signals):
    """Starts attempts as forks; in the first one, rank 1 hangs after step 3."""

    def __init__(self, jobs: Jobs, run: Run, hang: str) -> None:
        self.jobs, self.run, self.hang, self.received, self.host = jobs, run, hang, 0, this_host({})

    def begin(self, _: Sequence[str], environment: Mapping[str, str]) -> Any:
        hang = {"HANGS": self.hang} if self.hang else {}
        directory = job_files.ATTEMPT_DIRECTORY
        self.hang, self.jobs.environment = "", hang | {directory: environment[directory]}
        self.child: Any = Attempt(self.jobs, self.run)
        return self.child


@pytest.mark.parametrize(
    ("hang", "layout", "limit", "why"),
    [
        ("stopped", {"engine": "trl", "parallelism.ranks_per_node": 2}, "", "in step 4: its process is stopped"),
        # with two ranks, all groups are one, in which gloo would find that sizes differ
        (
            "deadlock",
            LAYOUT,
            "10",
            "in step 5: it has not begun a collective, gloo:all_reduce, in which others wait, at ",
        ),
        ("read", TWO_RANKS, "10", "in step 4: others wait for it, at load (_npyio_impl.py"),
    ],
)
def test_a_rank_that_hangs_is_named_and_all_are_started_again(
    make_run: MakeRun,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    hang: str,
    layout: dict[str, Any],
    limit: str,
    why: str,
) -> None:
    run = make_run(settings=layout | {"training.max_steps": 6, "training.save_every_steps": 3})
    tiny_tokenizer.make().save_pretrained(run.paths.base_model)  # for engine trl
    jobs: Jobs = request.getfixturevalue("trl_jobs" if run.config.engine == "trl" else "jobs")
    if limit:
        monkeypatch.setenv(LIMIT, limit)
    status = supervisor.supervise(run, "train", [], ForkingSignals(jobs, run, hang))
    hung, restarted = (job.text() for job in jobs.started)
    assert status == 0, restarted
    (restart,) = attempts.history(run.paths, "train")
    assert restart.reason.startswith(f"rank 1 on {os.uname().nodename} hangs "), hung
    assert why in restart.reason
    assert f"watch: {restart.reason}" in hung
    (stacks,) = job_files.hangs(run.paths.directory).iterdir()
    assert len(list(stacks.iterdir())) == run.plan.degrees.world_size
    assert "waits in gloo:all_" in (stacks / "rank-00000.txt").read_text()
    found = stacks.stat().st_mtime
    back = min(row["time"] for row in metrics(run) if row["time"] > found)
    assert back - found + float(limit or 60) < 90
