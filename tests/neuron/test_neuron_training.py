"""Engine neuron exports what it trained, in every layout; on the real trainer (see conftest.py)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hyperpod_ft.run import Run
from hyperpod_ft.stages import consolidate, merge, stage
from tests.neuron.conftest import MakeRun, llama
from tests.neuron.probe import probe
from tests.training.conftest import Jobs, curve

pytestmark = pytest.mark.neuron

ATTENTION_AND_MLP = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def train(jobs: Jobs, run: Run, out: Path) -> torch.Tensor:
    """The live model's logits after training."""
    job = jobs.start(run.plan.degrees.world_size, ["worker", str(run.directory), str(out)])
    assert job.wait(600) == 0, job.text()
    return load_file(out)["logits"]


def exported(run: Run) -> torch.Tensor:
    """The logits of the model that the stages after training leave."""
    for name, work in (("consolidate", consolidate.work), ("merge", merge.work)):
        if name in run.plan:
            result = work(run)
            stage.Record(name, run.plan[name].fingerprint, {}, run.describe(result.outputs), {}, "", 0.0, "", "").write(
                run.record_path(name)
            )
    model = AutoModelForCausalLM.from_pretrained(run.tuned_model, dtype="auto", attn_implementation="eager")
    with torch.no_grad():
        return model(probe(model.config.vocab_size)).logits.float()


@pytest.mark.parametrize(
    ("layout", "kv_heads", "settings"),
    [
        ({"tp": 2}, 4, {}),
    ],
)
def test_what_is_exported_is_what_was_trained(
    layout: dict[str, int],
    kv_heads: int,
    settings: dict[str, Any],
    neuron_jobs: Jobs,
    make_run: MakeRun,
    tmp_path: Path,
) -> None:
    run = make_run(**layout, settings=settings, model=llama(num_key_value_heads=kv_heads))
    live = train(neuron_jobs, run, tmp_path / "logits.safetensors")
    difference = (exported(run) - live).abs().max().item()
    print(f"{layout} kv {kv_heads} {settings}: largest difference {difference:.2e}, {curve(run)}")
    assert difference <= 1e-5
