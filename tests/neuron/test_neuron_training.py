"""Engine neuron exports what it trained, in every layout; on the real trainer (see conftest.py)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

from hyperpod_ft.runs.records import outputs_of
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import consolidate, merge, stage
from tests.neuron.conftest import PATIENCE_SECONDS, MakeRun, llama
from tests.neuron.probe import probe
from tests.training.conftest import Jobs, curve

pytestmark = pytest.mark.neuron

NO_SEQUENCE_PARALLEL = {"neuron.sequence_parallel": False}
FULL = {"training.method": "full", "training.learning_rate": 1e-3}
BF16 = {"training.precision": "bf16"}
# other ranks form groups there, and neuronx-distributed spreads copies of heads in another order
TRN2 = {"cluster.instance_type": "trn2.48xlarge"}
# fp32 differs by the order of sums; of bf16 the logits alone are rounded to 8 bits, on both sides
FP32_TOLERANCE, BF16_TOLERANCE = 1e-5, 2e-2


def train(jobs: Jobs, run: Run, out: Path) -> torch.Tensor:
    """The live model's logits after training."""
    job = jobs.start(run.plan.degrees.world_size, ["worker", str(run.paths.directory), str(out)])
    assert job.wait(PATIENCE_SECONDS) == 0, job.text()
    return load_file(out)["logits"]


def exported(run: Run) -> torch.Tensor:
    """The logits of the model that the stages after training leave."""
    for name, work in (("consolidate", consolidate.work), ("merge", merge.work)):
        if name in run.plan:
            result = work(run)
            stage.Record(
                name, run.plan[name].fingerprint, {}, outputs_of(run.paths.root, result.outputs), {}, "", 0.0, "", ""
            ).write(run.paths.record_path(name))
    return logits(run.paths.tuned_model)


def logits(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", attn_implementation="eager")
    with torch.no_grad():
        return model(probe(model.config.vocab_size)).logits.float()


@pytest.mark.parametrize(
    ("layout", "kv_heads", "settings"),
    [
        ({"tp": 2}, 4, {}),
        ({"tp": 2}, 2, NO_SEQUENCE_PARALLEL),
        ({"tp": 2, "dp": 2}, 8, {"training.gradient_accumulation_steps": 2}),
        ({"tp": 2, "dp": 2}, 4, {"neuron.zero_1": False, "neuron.xser": False, "training.async_save": True}),
        ({"tp": 2}, 4, {"training.activation_checkpointing": "full", "lora.rslora": True}),
        ({"tp": 8}, 8, {}),
        ({"tp": 8}, 4, {}),
        ({"tp": 8}, 2, NO_SEQUENCE_PARALLEL),
        ({"tp": 4}, 2, {}),
        ({"tp": 4, "dp": 2}, 2, {}),
        ({"tp": 4, "dp": 2}, 4, {}),
        ({"tp": 4, "dp": 2}, 2, TRN2),
        ({"tp": 8, "dp": 2}, 4, {}),
        ({"tp": 2}, 4, FULL),
        ({"tp": 2, "dp": 2}, 2, FULL | {"training.activation_checkpointing": "full"}),
        ({"tp": 4, "dp": 2}, 2, FULL),
        ({"tp": 8}, 4, FULL),
        ({"tp": 2}, 8, FULL | {"neuron.fuse_qkv": True}),
        ({"tp": 2}, 4, BF16),
        ({"tp": 8}, 2, BF16),
        ({"tp": 4, "dp": 2}, 2, BF16 | FULL),
        ({"tp": 2, "dp": 2}, 4, BF16 | FULL),
    ],
    ids=str,
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
    print(f"{layout}, {kv_heads} KV heads, {settings}: largest difference {difference:.2e}, losses {curve(run)}")
    tolerance = BF16_TOLERANCE if run.config.training.precision == "bf16" else FP32_TOLERANCE
    assert difference <= tolerance
    # and it is not the base model's
    assert (logits(run.paths.base_model) - live).abs().max() > 4 * tolerance


@pytest.mark.parametrize("settings", [FULL, FULL | NO_SEQUENCE_PARALLEL, {}], ids=str)
def test_qwen3_is_exported_as_it_was_trained(
    settings: dict[str, Any], neuron_jobs: Jobs, make_run: MakeRun, tmp_path: Path
) -> None:
    """Its norms of queries and keys are one for all heads, of which each rank has some."""
    qwen3 = Qwen3Config(**{**llama().to_dict(), "model_type": "qwen3", "architectures": None, "head_dim": 16})
    run = make_run(tp=2, settings=settings, model=qwen3)
    live = train(neuron_jobs, run, tmp_path / "logits.safetensors")
    difference = (exported(run) - live).abs().max().item()
    print(f"Qwen3, {settings}: largest difference {difference:.2e}")
    assert difference <= FP32_TOLERANCE


@pytest.mark.parametrize(
    ("layout", "kv_heads", "settings"),
    [
        ({"tp": 2}, 4, {}),
        ({"tp": 2, "dp": 2}, 2, NO_SEQUENCE_PARALLEL),
        ({"tp": 8}, 8, {}),
        # query, key and value share one lora_A where key and value heads are repeated: no other degree trains the same
        ({"tp": 8}, 4, {"lora.target_modules": ["o_proj", "gate_proj", "up_proj", "down_proj"]}),
        ({"tp": 2, "dp": 2}, 4, FULL | {"training.activation_checkpointing": "full"}),
        ({"tp": 4, "dp": 2}, 2, {"lora.target_modules": ["o_proj", "gate_proj", "up_proj", "down_proj"]}),
        ({"tp": 4, "dp": 2}, 2, FULL),
        ({"tp": 4, "dp": 2}, 2, FULL | TRN2),
        ({"tp": 8}, 2, FULL),
        ({"tp": 8, "dp": 2}, 4, FULL),
    ],
    ids=str,
)
def test_every_layout_trains_as_one_rank_does(
    layout: dict[str, int], kv_heads: int, settings: dict[str, Any], neuron_jobs: Jobs, make_run: MakeRun
) -> None:
    model = llama(num_key_value_heads=kv_heads)
    # small enough that gradients are clipped
    settings = {"training.max_grad_norm": 0.1} | settings
    alone, divided = (
        make_run("alone", tp=1, settings=settings, model=model),
        make_run("divided", **layout, settings=settings, model=model),
    )
    for run in (alone, divided):
        neuron_jobs.train(run)
    print(f"{layout}, {kv_heads} KV heads, {settings}: {curve(alone)} {curve(divided)}")
    assert any(row[3] > run.config.training.max_grad_norm for row in curve(alone)), "clipped"
    assert np.allclose(curve(divided), curve(alone), rtol=2e-5, atol=0)


def test_a_pipeline_trains_all_of_its_stages(neuron_jobs: Jobs, make_run: MakeRun) -> None:
    """Its loss is the mean over rows of each row's own, so it is near one rank's and not the same."""
    alone, divided = make_run("alone", tp=1), make_run("divided", tp=2, pp=2)
    for run in (alone, divided):
        neuron_jobs.train(run)
    print(curve(alone), curve(divided))
    assert np.allclose([row[1] for row in curve(divided)], [row[1] for row in curve(alone)], rtol=2e-2)
    consolidate.work(divided)
    factors = load_file(divided.paths.adapter / "adapter_model.safetensors")
    assert len(factors) == 28 and all(factor.abs().max() > 0 for factor in factors.values())
    record = divided.journal.record("train")
    # gate_proj and up_proj share one lora_A, which PEFT's format has twice
    trained = sum(factor.numel() for name, factor in factors.items() if "up_proj.lora_A" not in name)
    assert record is not None and record.facts["trainable_parameters"] == trained


@pytest.mark.parametrize("differing", ["qkv_proj.lora_B.default.weight_v", "gate_up_proj.lora_A.default.weight"])
def test_a_save_refuses_copies_that_differ(differing: str, neuron_jobs: Jobs, make_run: MakeRun) -> None:
    """Of a repeated head, which two of four ranks hold, and of what every rank holds."""
    run = make_run(tp=4, settings={"training.save_every_steps": 2}, model=llama(num_key_value_heads=2))
    job = neuron_jobs.start(4, ["diverging", str(run.paths.directory), differing])
    assert job.wait(PATIENCE_SECONDS) != 0
    lines = [line for line in job.text().splitlines() if "RuntimeError: step 2" in line]
    assert lines, job.text()
    assert all("2 parameters differ between ranks" in line and differing in line for line in lines)
    assert not list(run.paths.checkpoints.glob("*"))
