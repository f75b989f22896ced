"""The whole chain of engine trl on a real Slurm, with a rank killed in the middle of the training."""

import json
import os
import signal
from pathlib import Path

import pytest

from hyperpod_ft.runs.run import Run
from tests.slurm.head import Head
from tests.slurm.test_pipeline import metrics, ranks_of, values

pytestmark = [pytest.mark.slurm, pytest.mark.training, pytest.mark.timeout(600)]
STEPS = 24


def test_a_run_of_trl_ends_well_after_a_kill(head: Head, tmp_path: Path) -> None:
    training = {"save_every_steps": 4, "validate_every_steps": 8, "keep_best": True, "max_steps": STEPS}
    content = values(tmp_path / "volume", **training) | {"engine": "trl", "env": {"python": "current"}}
    content["trl"] = {"neftune_noise_alpha": 1.0}
    run_file = head.write(content)
    head("submit", run_file)
    status = head.status()
    run = Run.open(Path(status["directory"]))
    head.wait(lambda: len(metrics(status["directory"])) >= 6, seconds=540, every=0.05)
    os.kill(ranks_of(status["directory"])[0], signal.SIGKILL)
    head.wait_for_the_queue(seconds=540)
    done = head.status()
    assert {stage["state"] for stage in done["stages"]} == {"done"}, done
    assert [row["step"] for row in metrics(status["directory"])] == list(range(1, STEPS + 1))
    record = run.journal.record("train")
    assert record is not None and [restart["cause"] for restart in record.facts["restarts"]] == ["crash"]
    assert record.facts["resumed_from"] and record.facts["best_step"] % 8 == 0
    samples = json.loads(run.paths.samples_path.read_text())
    assert samples["validation_loss"]["tuned"]["mean"] < samples["validation_loss"]["base"]["mean"]
