"""Validation losses during training, the best weights, early stopping, and checkpoints written by a thread."""

import json
import os
import resource
import shutil
import signal
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from hyperpod_ft import digests, publish
from hyperpod_ft.checkpoint.sharded import description
from hyperpod_ft.config.sections.training import Training
from hyperpod_ft.data.mixing.mixture import spread
from hyperpod_ft.data.mixing.source_report import SourceReport
from hyperpod_ft.engines import engine, sanity
from hyperpod_ft.engines.batches import PackedSplit
from hyperpod_ft.engines.interface import TrainingProgress
from hyperpod_ft.engines.ranks import Ranks
from hyperpod_ft.engines.torch.checkpoints import Checkpoints
from hyperpod_ft.engines.torch.mesh import make_meshes
from hyperpod_ft.engines.torch.objectives.validation import Means, SourceRows, Validation
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.layout import Degrees
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import consolidate
from tests.tasks import task_of
from tests.training.conftest import (
    MakeRun,
    TrainProgram,
    curve,
    metrics,
    process_group_of_its_own,
    train_here,
    write_rows,
)

pytestmark = pytest.mark.training

EVERY_2 = {"training.max_steps": 6, "training.validate_every_steps": 2, "training.save_every_steps": 2}
ALL = [SourceRows("", np.arange(5), 7)]
# the validation rows are other random tokens: what is learned by heart makes them less likely
OVERFITS = {"training.learning_rate": 5e-2, "training.schedule": "constant", "training.sanity_steps": 0}


@pytest.fixture
def make_validated(make_run: MakeRun) -> MakeRun:
    def make(settings: dict[str, Any], **more: Any) -> Run:
        run = make_run(settings=settings, **more)
        if not (run.paths.dataset_path / "validation").exists():
            write_rows(run.paths.dataset_path / "validation", rows=5, max_length=32, seed=9)
        return run

    return make


def validation_losses(run: Run) -> dict[int, float]:
    return {row["step"]: row["validation_loss"] for row in metrics(run) if row["validation_loss"] is not None}


def mean_loss(model_directory: Path, split: Path) -> float:
    """The loss of every document by itself, over the split's label tokens."""
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    arrays = [np.load(split / f"{name}.npy").astype(np.int64) for name in ("input_ids", "labels", "position_ids")]
    total, count = 0.0, 0
    for input_ids, labels, positions in zip(*arrays, strict=True):
        starts = np.flatnonzero(positions == 0)
        for start, end in zip(starts, [*starts[1:], len(input_ids)], strict=True):
            wanted = torch.from_numpy(labels[start:end])[1:]
            with torch.no_grad():
                logits = model(torch.from_numpy(input_ids[None, start:end])).logits[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
            count += int((wanted != -100).sum())
    return total / count


def test_losses_of_base_and_last_weights_are_those_of_the_models(make_validated: MakeRun) -> None:
    run = make_validated(EVERY_2 | {"training.method": "full"})
    facts = train_here(run).facts
    assert facts["base_validation_loss"] == pytest.approx(
        mean_loss(run.paths.base_model, run.paths.dataset_path / "validation"), rel=1e-5
    )
    losses = validation_losses(run)
    assert list(losses) == [2, 4, 6]
    assert facts["validation_loss"] == losses[6]
    assert facts["best_validation_loss"] == min(losses.values())
    consolidate.work(run)
    assert losses[6] == pytest.approx(mean_loss(run.paths.tuned_model, run.paths.dataset_path / "validation"), rel=1e-5)


def test_validation_changes_nothing_of_the_training(make_validated: MakeRun) -> None:
    """Neither weights nor dropout; without a setting it is validated once, at the end."""
    dropout = {"lora": {"r": 4, "alpha": 8, "dropout": 0.1}}
    often, once = (
        make_validated(settings | dropout, name=name)
        for name, settings in (("a", EVERY_2), ("b", {"training.max_steps": 6}))
    )
    train_here(often)
    train_here(once)
    assert curve(often) == curve(once)
    assert list(validation_losses(once)) == [6]
    assert validation_losses(once)[6] == validation_losses(often)[6]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_best_weights_become_the_model(make_validated: MakeRun, dtype: str) -> None:
    best = {"training.keep_best": True, "training.method": "full", "training.weights_dtype": dtype}
    run = make_validated(EVERY_2 | OVERFITS | best)
    facts = train_here(run).facts
    losses = validation_losses(run)
    assert facts["best_step"] == min(losses, key=losses.__getitem__) < 6, "or this test shows nothing"
    described = json.loads((run.paths.best_checkpoint / "checkpoint.json").read_text())
    assert described["step"] == facts["best_step"]
    consolidate.work(run)
    rounding = 1e-5 if dtype == "fp32" else 2e-3
    assert mean_loss(run.paths.tuned_model, run.paths.dataset_path / "validation") == pytest.approx(
        facts["best_validation_loss"], rel=rounding
    )
    shutil.rmtree(run.paths.best_checkpoint)
    with pytest.raises(UserError, match="best"):
        consolidate.work(run)


def test_best_weights_of_an_abandoned_attempt_are_not_used(
    make_validated: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained again, on accelerators with other bits, another step may be the best."""
    settings = EVERY_2 | {"training.keep_best": True, "training.keep_checkpoints": 9}
    run = make_validated(settings)
    losses = iter([9.0, 5.0, 6.0, 3.0])
    monkeypatch.setattr(Validation, "means", lambda *_: Means([next(losses)], {}))
    train_here(run)
    assert description.read(run.paths.best_checkpoint).step == 6
    # as if killed after the best weights of step 6, before its checkpoint
    shutil.rmtree(run.paths.checkpoint(6))
    run.paths.record_path("train").unlink()
    losses = iter([7.0])
    with pytest.raises(UserError, match=r"best: not a complete checkpoint of this run"):
        train_here(run)
    assert run.journal.record("train") is None
    # killed earlier, the best step is trained again
    for step in (2, 4, 6):
        shutil.rmtree(run.paths.checkpoint(step))
    losses = iter([9.0, 8.0, 4.0, 7.0])
    assert train_here(run).facts["best_step"] == description.read(run.paths.best_checkpoint).step == 4
    # of another step than recorded
    run.paths.record_path("train").unlink()
    described = run.paths.best_checkpoint / "checkpoint.json"
    publish.write_json(described, json.loads(described.read_text()) | {"step": 2})
    with pytest.raises(UserError, match=r"best: is of step 2, but the best step was 4"):
        train_here(run)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_interrupted_is_uninterrupted(make_validated: MakeRun, asynchronous: bool) -> None:
    settings = EVERY_2 | OVERFITS | {"training.keep_best": True, "training.async_save": asynchronous}
    run = make_validated(settings | {"training.max_steps": 8, "training.keep_checkpoints": 9})
    first = train_here(run)
    whole, best = curve(run), (run.paths.best_checkpoint / "__0_0.distcp").read_bytes()
    losses = validation_losses(run)
    run.paths.record_path("train").unlink()
    for step in (6, 8):
        shutil.rmtree(run.paths.checkpoint(step))
    again = train_here(run)
    assert again.facts["resumed_from"] == [4]
    assert (curve(run), validation_losses(run)) == (whole, losses)
    assert (run.paths.best_checkpoint / "__0_0.distcp").read_bytes() == best
    same = ("best_step", "best_validation_loss", "base_validation_loss", "validation_loss")
    assert [again.facts[key] for key in same] == [first.facts[key] for key in same]


def test_a_memory_checkpoint_needs_its_best_weights_and_its_rows(
    make_validated: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"training.keep_best": True, "training.memory_checkpoint_every_steps": 1}
    run = make_validated(EVERY_2 | OVERFITS | settings | {"training.save_every_steps": 5})
    task = replace(task_of(run), memory=tmp_path / "job" / "node")

    def trained() -> tuple[dict[str, Any], str]:
        with process_group_of_its_own():
            result = engine("torch").train(task, Ranks(0, 1, 0, torch.distributed.HashStore()))
        return result.facts, capsys.readouterr().out

    def crash(config: Training, progress: TrainingProgress, *_: Any) -> None:
        if progress.step == 5:
            raise RuntimeError("crash")

    logged: list[dict[str, Any]] = []
    with monkeypatch.context() as crashing:
        crashing.setattr(sanity, "check", crash)
        for rows, begun in ((0, 0), (5, 4), (3, 0)):
            if rows < 5:  # they were lost
                run.paths.metrics_path.write_text("".join(f"{json.dumps(row)}\n" for row in logged[:rows]))
            with pytest.raises(RuntimeError, match="crash"):
                trained()
            assert ("train: step 4 is in the nodes' memory\n" in capsys.readouterr().out) == (begun == 4)
            logged = metrics(run)
    shutil.rmtree(run.paths.best_checkpoint)
    facts, said = trained()
    assert facts["resumed_from"] == [] and facts["best_step"] and "memory" not in said
    assert not (tmp_path / "job").exists()


def test_a_training_that_gets_no_better_stops(make_validated: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    patience = {"training.early_stopping_patience": 2, "training.max_steps": 40, "training.keep_best": True}
    run = make_validated(EVERY_2 | OVERFITS | patience)
    record = train_here(run)
    losses = validation_losses(run)
    best = min(losses, key=losses.__getitem__)
    assert record.facts["stopped_early"] and record.facts["steps"] == max(losses) == best + 4 < 40
    assert f"lowest, {losses[best]:.4f}, after step {best}" in capsys.readouterr().out
    # started again, it is still over
    run.paths.record_path("train").unlink()
    assert train_here(run).facts == record.facts
    consolidate.work(run)


def test_weights_alone_are_saved_once(make_validated: MakeRun) -> None:
    run = make_validated(EVERY_2 | {"training.save_only_model": True, "training.weights_dtype": "bf16"})
    full = make_validated(EVERY_2, name="full")
    first = train_here(run)
    train_here(full)
    assert [path.name for path in run.paths.checkpoints.iterdir()] == ["step-00000006"]
    sizes = [(each.paths.checkpoint(6) / "__0_0.distcp").stat().st_size for each in (run, full)]
    assert sizes[0] < 0.6 * sizes[1]
    run.paths.record_path("train").unlink()
    assert train_here(run).facts == first.facts
    consolidate.work(run)
    consolidate.work(full)
    rounded, exact = (load_file(each.paths.adapter / "adapter_model.safetensors") for each in (run, full))
    for name, tensor in exact.items():
        assert torch.equal(rounded[name].float(), tensor.bfloat16().float())


def test_a_stopped_run_that_saves_no_state_says_so(
    make_validated: MakeRun, train_program: TrainProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_validated(EVERY_2 | {"training.save_only_model": True})
    check = sanity.check

    def stop_after_step_3(training: Training, progress: TrainingProgress, *more: Any) -> None:
        if progress.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        check(training, progress, *more)

    monkeypatch.setattr(sanity, "check", stop_after_step_3)
    status, said = train_program(run)
    assert status == 128 + signal.SIGTERM and not list(run.paths.checkpoints.iterdir())
    assert "stopped after step 3, without saving it (training.save_only_model): the next attempt starts again" in said


def test_sources_have_losses_of_their_own(make_validated: MakeRun, train_program: TrainProgram) -> None:
    """Of the rows of each, over label tokens; the loss over all rows is that over all their tokens."""
    run = make_validated(EVERY_2 | {"training.method": "full"})
    split, rows = run.paths.dataset_path / "validation", {"chat": 3, "books": 2}
    counts = dict.fromkeys((field.name for field in fields(SourceReport)), 0)
    sources = [counts | {"name": name, "validation_rows": count} for name, count in {**rows, "other": 0}.items()]
    (run.paths.dataset_path / "report.json").write_text(json.dumps({"sources": sources}))
    status, said = train_program(run)
    assert status == 0
    source_of, tokens, expected = spread([*rows.values()]), {}, {}
    for number, name in enumerate(rows):
        own = run.paths.directory / name
        own.mkdir()
        for array in ("input_ids", "labels", "position_ids"):
            np.save(own / f"{array}.npy", np.load(split / f"{array}.npy")[source_of == number])
        expected[f"base_validation_loss/{name}"] = mean_loss(run.paths.base_model, own)
        tokens[name] = int((np.load(own / "labels.npy")[:, 1:] != -100).sum())
    trained = run.journal.record("train")
    assert trained is not None
    facts = trained.facts
    assert {key: facts[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    assert facts["base_validation_loss"] == pytest.approx(mean_loss(run.paths.base_model, split), rel=1e-5)
    validated = [row for row in metrics(run) if row["validation_loss"] is not None]
    assert len(validated) == 3
    for row in validated:
        of_sources = {name: row[f"validation_loss/{name}"] for name in rows}
        mean = sum(of_sources[name] * tokens[name] for name in rows) / sum(tokens.values())
        assert row["validation_loss"] == pytest.approx(mean, rel=1e-6) and len({*of_sources.values()}) == 2
        assert "validation_loss/other" not in row
    last = validated[-1]
    assert all(facts[f"validation_loss/{name}"] == last[f"validation_loss/{name}"] for name in rows)
    assert f"validation {last['validation_loss']:.4f}  validation/chat {last['validation_loss/chat']:.4f}" in said


def test_one_source_has_one_loss(make_validated: MakeRun) -> None:
    run = make_validated(EVERY_2)
    train_here(run)
    assert not [key for row in metrics(run) for key in row if "/" in key]


def test_ranks_of_a_tp_group_get_one_loss(make_validated: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though their sums differ in the last bit, as they may on accelerators."""
    directory = make_validated(EVERY_2).paths.dataset_path / "validation"
    sums = (torch.tensor(300.0), torch.nextafter(torch.tensor(300.0), torch.tensor(301.0)))
    losses = []
    for rank in range(2):

        def add_the_other(tensor: torch.Tensor, group: object = None, other: torch.Tensor = sums[1 - rank]) -> None:
            tensor += other if group is None else 0

        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            meshes = make_meshes("cpu", Degrees(1, 2, 2, 1), 1)
            monkeypatch.setattr(torch.distributed, "all_reduce", add_the_other)
            validation = Validation(PackedSplit(directory), ALL, 5, torch.device("cpu"), meshes)
            means = validation.means(torch.nn.Identity(), lambda _, own=sums[rank]: own[None])  # type: ignore[misc]
            losses += means.overall
        finally:
            torch.distributed.destroy_process_group()
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(300 / 7, rel=1e-6)


def test_validation_leaves_no_layer_gathered(make_validated: MakeRun) -> None:
    directory = make_validated(EVERY_2).paths.dataset_path / "validation"
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        meshes = make_meshes("cpu", Degrees(1, 1, 1, 1), 1)
        module = fully_shard(torch.nn.Linear(2, 2), mesh=meshes.weights["dp_shard"], reshard_after_forward=False)
        validation = Validation(PackedSplit(directory), ALL, 5, torch.device("cpu"), meshes)
        validation.means(module, lambda _: module(torch.ones(2)))
        assert isinstance(module.weight, DTensor)
    finally:
        torch.distributed.destroy_process_group()


def test_a_run_may_stop_saving_its_state(make_validated: MakeRun) -> None:
    """It resumes from the state that it has saved before."""
    run = make_validated({"training.max_steps": 6, "training.save_every_steps": 3})
    train_here(run)
    whole = curve(run)
    run.paths.record_path("train").unlink()
    shutil.rmtree(run.paths.checkpoint(6))
    changed = make_validated(
        {"training.max_steps": 6, "training.save_every_steps": 3, "training.save_only_model": True}
    )
    assert changed.paths.directory == run.paths.directory
    assert train_here(changed).facts["resumed_from"] == [3]
    assert curve(changed) == whole


def test_files_are_hashed_while_they_are_written(make_validated: MakeRun) -> None:
    run = make_validated({"training.async_save": True})
    train_here(run)
    described = json.loads((run.paths.checkpoint(4) / "checkpoint.json").read_text())
    assert set(described["sha256"]) == {".metadata", "__0_0.distcp"}
    for name, digest in described["sha256"].items():
        assert digests.file_sha256(run.paths.checkpoint(4) / name) == digest


def test_a_checkpoint_that_a_thread_cannot_write_stops_the_run(make_validated: MakeRun) -> None:
    run = make_validated({"training.async_save": True, "training.save_every_steps": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(UserError, match=r"checkpoint cannot be written: File too large"):
            train_here(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert run.journal.record("train") is None and not list(run.paths.checkpoints.iterdir())


def test_a_stop_keeps_the_checkpoint_that_a_thread_writes(
    make_validated: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = threading.Event()
    write, check = Checkpoints._write_files, sanity.check

    def write_late(self: Checkpoints, state: dict[str, Any], directory: Path) -> dict[str, str]:
        assert stopped.wait(300)
        return write(self, state, directory)

    def stop_at_step_3(training: Training, progress: TrainingProgress, *more: Any) -> None:
        if progress.step == 3:
            stopped.set()
            raise UserError("step 3: ruined")
        check(training, progress, *more)

    monkeypatch.setattr(Checkpoints, "_write_files", write_late)
    monkeypatch.setattr(sanity, "check", stop_at_step_3)
    run = make_validated({"training.async_save": True, "training.save_every_steps": 2})
    with pytest.raises(UserError, match="ruined"):
        train_here(run)
    monkeypatch.undo()
    assert train_here(run).facts["resumed_from"] == [2]
