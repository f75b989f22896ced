"""A training that goes on with other ranks, degrees, sharding and memory settings has the losses of one that stays."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from elsewhere_worker import STEPS

from hyperpod_ft.launch.elsewhere import elsewhere
from tests.training.conftest import Jobs, MakeRun, tiny_llama

pytestmark = pytest.mark.training

SETTINGS: dict[str, Any] = {
    "parallelism": {"ranks_per_node": 4},
    "training.micro_batch_size": 2,
    "training.max_steps": 40,
    "training.learning_rate": 1e-3,
}
# What differs from four data-parallel ranks, place after place: each kind of parallelism beside others, and each
# sharding on another number of ranks.
PLACES: dict[str, list[dict[str, Any]]] = {
    "lora": [
        {},
        {"parallelism.tensor_parallel": 2, "parallelism.sharding": "zero1"},
        {
            "parallelism.tensor_parallel": 2,
            "parallelism.pipeline_parallel": 2,
            "training.activation_checkpointing": "full",
        },
        {"parallelism.context_parallel": 2, "parallelism.sharding": "zero3"},
        {"parallelism.ranks_per_node": 1},
    ],
    "full": [
        {},
        {"parallelism.pipeline_parallel": 2, "parallelism.sharding": "zero2"},
        {"parallelism.tensor_parallel": 4, "training.micro_batch_size": 1},
        {"parallelism.ranks_per_node": 2, "parallelism.sharding": "zero3"},
        {"parallelism.context_parallel": 2, "parallelism.tensor_parallel": 2, "parallelism.sharding": "zero1"},
    ],
}


def test_other_degrees_change_no_loss(make_run: MakeRun, jobs: Jobs, tmp_path: Path) -> None:
    runs = []
    for name, settings in PLACES.items():
        run = make_run(name, SETTINGS | {"training.method": name}, model=tiny_llama(tie_word_embeddings=name == "full"))
        places = [[f"{key}={value}" for key, value in place.items()] for place in settings]
        (run.paths.directory / "places.json").write_text(json.dumps(places))
        certified = run.journal.record("certify")
        assert certified
        for moved in (elsewhere(run, place) for place in places):
            # each way to divide a model has a certificate of its own
            replace(certified, fingerprint=moved.plan["certify"].fingerprint).write(moved.paths.record_path("certify"))
        runs.append(run)
    out = tmp_path / "losses.json"
    job = jobs.start(4, ["elsewhere_worker", str(out), *(str(run.paths.directory) for run in runs)])
    assert job.wait() == 0, job.text()
    for name, found in json.loads(out.read_text()).items():
        worst = max(abs(a / b - 1) for a, b in zip(found["moved"], found["unchanged"], strict=True))
        print(f"{name}: largest relative difference of a loss {worst:.1e}")
        assert len(found["moved"]) == STEPS * len(PLACES[name]) == 20
        assert found["moved"] == pytest.approx(found["unchanged"], rel=1e-5), name
        # three steps have all rows
        assert sum(found["unchanged"][6:9]) < sum(found["unchanged"][:3]), "it learns"
        assert found["other_bits"] == [], f"{name}: undone before the next step, a move changes nothing"
