"""Killed or stopped jobs of engine neuron: the losses equal those of an uninterrupted run, bit for bit on CPU."""

import os
import signal
from typing import Any

import pytest

from hyperpod_ft.runs.run import Run
from tests.neuron.conftest import MakeRun
from tests.training.conftest import Jobs, curve, metrics

pytestmark = pytest.mark.neuron

# dropout makes the random state matter
DROPOUT = {"lora": {"r": 4, "alpha": 8, "dropout": 0.1}}
STEPS = {"training.max_steps": 12, "training.save_every_steps": 4}


def last_step(run: Run) -> int:
    try:
        return run.paths.metrics_path.read_text().count("\n")
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize(
    "settings",
    [
        DROPOUT,
        {"training.method": "full", "training.learning_rate": 1e-3, "training.precision": "bf16"},
        {"neuron.zero_1": False, "training.async_save": True},
    ],
    ids=str,
)
def test_kill_9_half_way_changes_no_loss(settings: dict[str, Any], neuron_jobs: Jobs, make_run: MakeRun) -> None:
    undisturbed, killed = (make_run(name, tp=2, dp=2, settings=settings | STEPS) for name in ("undisturbed", "killed"))
    neuron_jobs.train(undisturbed)

    neuron_jobs.start_held(killed, after_step=9).kill()
    assert last_step(killed) == 9 and killed.journal.record("train") is None
    said = neuron_jobs.train(killed)

    assert curve(killed) == curve(undisturbed)
    assert [row["step"] for row in metrics(killed)] == list(range(1, 13))
    record = killed.journal.record("train")
    assert record is not None and record.facts["resumed_from"] in ([4], [8])
    assert f"resuming from step {record.facts['resumed_from'][0]}" in said
    assert [path.name for path in sorted(killed.paths.checkpoints.iterdir())] == ["step-00000008", "step-00000012"]


def test_sigterm_saves_a_damaged_file_is_passed_over_and_the_next_attempt_goes_on(
    neuron_jobs: Jobs, make_run: MakeRun
) -> None:
    run = make_run(tp=2, settings={"training.max_steps": 40, "training.save_every_steps": 2})
    job = neuron_jobs.start_held(run, after_step=3)
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.wait(300) != 0
    assert "SIGTERM: stopped after step" in job.text(), job.text()
    before, newest = sorted(run.paths.checkpoints.iterdir())
    assert newest.name == f"step-{last_step(run):08d}"

    file = newest / "resume" / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    said = neuron_jobs.train(run)
    assert said.count(f"ignoring checkpoint {newest.name}: resume/rank-00001.safetensors is damaged") == 1
    assert f"resuming from step {int(before.name.removeprefix('step-'))}" in said
    assert [row["step"] for row in metrics(run)] == list(range(1, 41))


def test_a_target_that_matches_nothing_is_one_line(neuron_jobs: Jobs, make_run: MakeRun) -> None:
    run = make_run(tp=2, settings={"lora": {"target_modules": ["q_proj", "nothing"]}})
    said = neuron_jobs.train(run, expect=1)  # torchrun's own status for a failed worker
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: train: lora.target_modules: 'nothing' matches no module of the model; set it")
