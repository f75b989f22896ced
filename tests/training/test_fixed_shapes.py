"""What TorchNeuron cannot do never happens in a step, as far as its limits are known; nothing was run on Trainium.

Training and validation of several steps, whose documents differ, on two ranks; see fixed_shapes_worker.py. What its
process group has was read in torch-neuronx's code, its other limits in AWS's documentation of Neuron 2.33.
"""

from typing import Any

import pytest

from hyperpod_ft.runs.run import Run
from tests.training.conftest import Jobs, MakeRun, metrics, write_rows

pytestmark = pytest.mark.training

FULL, DORA, BF16 = {"training.method": "full"}, {"lora.dora": True}, {"training.precision": "bf16"}
TP: dict[str, Any] = {"parallelism": {"ranks_per_node": 2, "tensor_parallel": 2}}
ZERO1, ZERO3 = ({"parallelism": {"ranks_per_node": 2, "sharding": mode}} for mode in ("zero1", "zero3"))
EAGER: dict[str, dict[str, Any]] = {
    "lora-tp": TP,
    "full-zero3": ZERO3 | FULL,
    "dora-zero1": ZERO1 | DORA,
    "full-tp": TP | FULL | BF16,
    "lora-cp": {"parallelism": {"ranks_per_node": 2, "context_parallel": 2}},
}
# the layouts of the recipes for trn2
COMPILED: dict[str, dict[str, Any]] = {
    "lora-tp": TP | {"training.activation_checkpointing": "full"},
    "full-zero3": ZERO3 | FULL | {"training.activation_checkpointing": "selective"},
}


def prepared(make_run: MakeRun, name: str, settings: dict[str, Any]) -> Run:
    steps = {"max_steps": 2, "validate_every_steps": 1, "gradient_accumulation_steps": 2}
    run = make_run(name, {f"training.{key}": value for key, value in steps.items()} | settings)
    if not (run.paths.dataset_path / "validation").exists():
        write_rows(run.paths.dataset_path / "validation", rows=3, max_length=32, seed=9)
    return run


@pytest.mark.parametrize(("layouts", "compiled"), [(EAGER, False), (COMPILED, True)], ids=["eager", "compiled"])
def test_every_step_is_what_the_device_can_do(
    make_run: MakeRun, jobs: Jobs, layouts: dict[str, dict[str, Any]], compiled: bool
) -> None:
    runs = [prepared(make_run, name, settings | {"training.compile": compiled}) for name, settings in layouts.items()]
    usual = prepared(make_run, "usual", layouts["lora-tp"])
    job = jobs.start(2, ["fixed_shapes_worker", *(str(run.paths.directory) for run in (*runs, usual))])
    assert job.wait(300) == 0, job.text()
    for key in ("loss", "grad_norm", "validation_loss"):
        expected = [row[key] for row in metrics(usual)]
        assert [row[key] for row in metrics(runs[0])] == pytest.approx(expected, rel=0, abs=1e-5), key
