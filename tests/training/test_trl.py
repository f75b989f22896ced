"""Engine trl: the rows that reach the model, losses, restarts, checkpoints and what is consolidated from them."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from hyperpod_ft.engines.batches import DataOrder, PackedSplit
from hyperpod_ft.engines.trl import loop
from hyperpod_ft.planning.trl.limits import FAMILIES
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import consolidate, merge
from tests.forking import ForkServer
from tests.training.conftest import (
    ENVIRONMENT,
    Jobs,
    MakeRun,
    curve,
    job_server,
    jobs_in,
    metrics,
    train_here,
    write_rows,
)
from tests.training.test_packed_families import SETTINGS
from tests.unit import tiny_tokenizer
from tests.unit.tiny_families import SIZES

pytestmark = pytest.mark.training
TRL = {"engine": "trl", "training.weight_decay": 0.1, "training.gradient_accumulation_steps": 2}
FULL = TRL | {"training.method": "full"}
# dropout makes the random state matter
DROPOUT = {"lora": {"r": 4, "alpha": 8, "dropout": 0.1}}


@pytest.fixture
def make_trl_run(make_run: MakeRun) -> MakeRun:
    def make(name: str = "run", settings: dict[str, Any] | None = None, **others: Any) -> Run:
        run = make_run(name, settings, **others)
        tiny_tokenizer.make().save_pretrained(run.paths.base_model)
        return run

    return make


@pytest.fixture(scope="module")
def trl_server() -> Iterator[ForkServer]:
    modules = ["hyperpod_ft.engines.trl.loop", "transformers.models.llama.modeling_llama"]
    with closing(job_server(modules, os.environ | ENVIRONMENT)) as server:
        yield server


@pytest.fixture
def trl_jobs(tmp_path: Path, trl_server: ForkServer) -> Iterator[Jobs]:
    with jobs_in(tmp_path / "jobs", trl_server) as jobs:
        yield jobs


def again_from(run: Run, step: int) -> None:
    """Forget what was trained after a step."""
    run.paths.record_path("train").unlink()
    for later, directory in run.paths.checkpoints_by_step().items():
        if later > step:
            (directory / "checkpoint.json").unlink()


def test_losses_are_those_of_engine_torch(make_run: MakeRun, make_trl_run: MakeRun) -> None:
    """Masks, order, schedule, weight decay and validation are the same."""
    validation = {"dataset.validation_share": 0.1, "training.validate_every_steps": 2}
    curves = []
    for name in ("trl", "torch"):
        run = make_trl_run(name, FULL | validation | {"engine": name, "training.max_steps": 6})
        write_rows(run.paths.dataset_path / "validation", 5, 32, seed=1)
        facts = train_here(run).facts
        losses = [row["validation_loss"] for row in metrics(run) if row["validation_loss"]]
        curves.append(
            [facts["base_validation_loss"], *losses, *(value for _, *values in curve(run) for value in values)]
        )
    assert len(curves[0]) == 4 + 3 * 6
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"llama"}))
def test_every_type_trains_as_with_engine_torch(make_trl_run: MakeRun, family: str) -> None:
    """Its packed documents do not see one another, and TRL's loss is the model's own."""
    model = AutoConfig.for_model(family, **SIZES | {"vocab_size": 128} | SETTINGS[family])
    curves = []
    for name in ("trl", "torch"):
        run = make_trl_run(name, FULL | {"engine": name, "training.max_steps": 2}, model=model)
        train_here(run)
        curves.append([value for _, *values in curve(run) for value in values])
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


def test_rows_reach_the_model_as_prepared(make_trl_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    build = loop.trainers.build

    def watched(*given: Any) -> Any:
        trainer, collator = build(*given)
        trainer.model.register_forward_pre_hook(lambda _, __, inputs: seen.append(inputs), with_kwargs=True)
        return trainer, collator

    monkeypatch.setattr(loop.trainers, "build", watched)
    run = make_trl_run(settings=FULL)
    train_here(run)
    rows, order = PackedSplit(run.paths.dataset_path / "train"), DataOrder(24, 42, 4, 2, 1)
    expected = [rows.batch(part) for step in range(1, 5) for part in order.micro_batches(step, 0)]
    assert len(seen) == len(expected)
    for inputs, batch in zip(seen, expected, strict=True):
        assert "attention_mask" not in inputs
        for name in ("input_ids", "labels", "position_ids"):
            assert torch.equal(inputs[name], getattr(batch, name)), name


def test_a_restart_changes_no_loss(make_trl_run: MakeRun) -> None:
    run = make_trl_run(settings=TRL | DROPOUT | {"training.max_steps": 6, "training.save_every_steps": 2})
    train_here(run)
    whole = curve(run)
    assert [path.name for path in sorted(run.paths.checkpoints.iterdir())] == ["step-00000004", "step-00000006"]
    again_from(run, 4)
    assert train_here(run).facts["resumed_from"] == [4] and curve(run) == whole


@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_tuned_model_is_what_was_trained(make_trl_run: MakeRun, method: str) -> None:
    run = make_trl_run(settings=TRL | {"training.method": method})
    train_here(run)
    consolidate.work(run)
    ids = torch.arange(20)[None]
    written = run.paths.checkpoint(4)
    if method == "lora":
        merge.work(run)
        base = AutoModelForCausalLM.from_pretrained(run.paths.base_model)
        trained = PeftModel.from_pretrained(base, written)
    else:
        trained = AutoModelForCausalLM.from_pretrained(written)
    tuned = AutoModelForCausalLM.from_pretrained(run.paths.tuned_model)
    with torch.no_grad():
        assert torch.allclose(tuned(ids).logits, trained(ids).logits, atol=1e-5)
    assert np.isfinite(curve(run)[-1][1])


def test_kill_9_of_two_ranks_changes_no_loss(make_trl_run: MakeRun, trl_jobs: Jobs) -> None:
    settings = TRL | DROPOUT | {"parallelism": {"ranks_per_node": 2}, "training.micro_batch_size": 1}
    settings |= {"training.max_steps": 12, "training.save_every_steps": 4}
    undisturbed, killed = make_trl_run("undisturbed", settings), make_trl_run("killed", settings)
    trl_jobs.train(undisturbed)
    trl_jobs.start_held(killed, after_step=6).kill()
    said = trl_jobs.train(killed)
    assert "from step 4\n" in said and curve(killed) == curve(undisturbed)
    assert [row["step"] for row in metrics(killed)] == list(range(1, 13))
