"""Training a T5: every layout computes what transformers does in one process on padded pairs, and restarts alike."""

from pathlib import Path

import pytest
import torch
from sharding_worker import STEPS
from test_layouts import compare, reference
from test_layouts import settings as layout
from test_sharding import check, job, settings
from transformers import AutoModelForSeq2SeqLM

from hyperpod_ft.runs.run import Run
from tests.training.conftest import Jobs, MakeRun, curve, train_here
from tests.unit import tiny_t5

pytestmark = pytest.mark.training

PAIRS = {
    "dataset.format": "prompt-completion",
    "dataset.max_target_length": 16,
    "lora": {"r": 4, "alpha": 8, "target_modules": ["q", "k", "v", "o", "wi_0", "wi_1", "wo"]},
}
FULL = {"training.method": "full", "lora": {"target_modules": ["q"]}}


def padded_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean over the labels of packed rows, each of whose pairs is a row of its own, by transformers."""
    sources, labels = [], []
    for ids, documents, targets, numbers in zip(
        *(batch[name] for name in ("input_ids", "documents", "labels", "decoder_documents")), strict=True
    ):
        for number in range(1, int(documents.max()) + 1):
            sources.append(ids[documents == number])
            labels.append(targets[numbers == number])
    pad = torch.nn.utils.rnn.pad_sequence
    ids, mask = pad(sources, batch_first=True), pad([torch.ones_like(source) for source in sources], batch_first=True)
    loss: torch.Tensor = model(
        input_ids=ids, attention_mask=mask, labels=pad(labels, batch_first=True, padding_value=-100)
    ).loss
    return loss


def by_transformers(run: Run, steps: int) -> dict[str, torch.Tensor]:
    return reference(run, steps, padded_loss, AutoModelForSeq2SeqLM)


def expected_of(run: Run) -> dict[str, torch.Tensor]:
    """After all steps."""
    tensors = by_transformers(run, STEPS)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("gradient")}
    return kept | {"loss": tensors["loss"][:STEPS]}


def test_two_ranks(make_run: MakeRun, jobs: Jobs, tmp_path: Path) -> None:
    """LoRA on v1.1 and all parameters of v1.0 and v1.1, with sharded optimizer and with sharded weights."""
    # where a unit is within rounding of 0, relu's derivative is 0 or 1 by chance; gelu has no such step
    v1_0, v1_1 = tiny_t5.config(gated=False, feed_forward_proj="gelu"), tiny_t5.config()
    checkpointed = {"training.activation_checkpointing": "full"}
    zero1, zero3 = ("zero1", 2, "none"), ("zero3", 2, "none")
    runs = {
        "lora": (make_run("lora", settings(2, 2, 2, **PAIRS), model=v1_1), [zero1, zero3]),
        "v1.0": (make_run("old", settings(2, 2, 2, **PAIRS | FULL), model=v1_0), [zero3]),
        "v1.1": (make_run("new", settings(2, 4, 1, **PAIRS | FULL | checkpointed), model=v1_1), [zero3]),
    }
    # of factors, more elements have a gradient that is mostly rounding than in a Llama
    expected = {name: expected_of(run) for name, (run, _) in runs.items()}
    check(job(jobs, tmp_path, 2, runs), expected, parameter_limit=1e-3)


def test_tensor_parallel(make_run: MakeRun, jobs: Jobs, tmp_path: Path) -> None:
    """Heads with their bias, units and words divided, with whole and with sharded weights; DoRA too."""
    dora = {"lora": PAIRS["lora"] | {"dora": True}}
    sharded = {"parallelism": {"ranks_per_node": 4, "tensor_parallel": 2, "sharding": "zero3"}}
    full = PAIRS | FULL
    runs = [
        make_run("lora", layout((2, 2, 2, 2), **PAIRS | dora), model=tiny_t5.config()),
        make_run("tied", layout((1, 4, 4, 2), **full), model=tiny_t5.config(gated=False)),
        make_run("untied", layout((2, 2, 4, 1), **full) | sharded, model=tiny_t5.config(num_decoder_layers=1)),
        make_run("untied-4", layout((1, 4, 4, 2), **full), model=tiny_t5.config()),
    ]
    compare(jobs, tmp_path, runs, 0, {"loss": 1e-6, "gradient": 1e-5}, runs, by_transformers)


def test_an_interruption_changes_no_step(make_run: MakeRun) -> None:
    """With dropout, as Flan-T5 is configured."""
    run = make_run(settings=PAIRS | {"training.save_every_steps": 2}, model=tiny_t5.config(dropout_rate=0.1))
    facts = train_here(run).facts
    whole = curve(run)
    assert facts["final_loss"] < facts["first_loss"] and facts["tokens"] == 4 * 2 * (32 + 16)
    run.paths.record_path("train").unlink()
    (run.paths.checkpoints / "step-00000004" / "checkpoint.json").unlink()
    assert train_here(run).facts["resumed_from"] == [2] and curve(run) == whole
