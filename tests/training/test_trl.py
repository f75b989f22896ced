"""Engine trl: the rows that reach the model, losses, restarts, checkpoints and what is consolidated from them."""

import errno
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from hyperpod_ft.data.prepared import SplitName, write_labels
from hyperpod_ft.engines.batches import DataOrder, PackedSplit
from hyperpod_ft.engines.checkpoint_directory import reporting_full_volumes
from hyperpod_ft.engines.ranks import Interrupted
from hyperpod_ft.engines.trl import loop
from hyperpod_ft.engines.trl.callback import StepsFollower
from hyperpod_ft.engines.trl.rows import numbered
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.trl import rules
from hyperpod_ft.runs.job_files import STOP_SIGNALS
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import consolidate, merge
from tests.tasks import task_of
from tests.training.conftest import (
    Jobs,
    MakeRun,
    TrainProgram,
    curve,
    metrics,
    tiny_llama,
    train_here,
    write_rows,
)
from tests.training.test_packed_families import SETTINGS
from tests.training.test_preferences import write_pairs
from tests.unit import tiny_tokenizer
from tests.unit.small_volume import small_volume
from tests.unit.tiny_families import DENSE, MIXTURES, SIZES

pytestmark = pytest.mark.training
TRL = {"engine": "trl", "training.weight_decay": 0.1, "training.gradient_accumulation_steps": 2}
FULL = TRL | {"training.method": "full"}
DPO = {"training.objective": "dpo", "dataset.format": "preference", "dataset.packing": "none", "dpo": {"beta": 0.2}}
KTO = {"training.objective": "kto", "dataset.format": "unpaired-preference"}
KTO |= {"dataset.validation_share": 0.1, "training.validate_every_steps": 5}
REWARD = {"training.objective": "reward", "dataset.format": "preference", "training.micro_batch_size": 1}
REWARD |= {"dataset.validation_share": 0.1, "training.validate_every_steps": 5}
SCORES = tiny_llama(architectures=["LlamaForSequenceClassification"], num_labels=1, pad_token_id=1)
# dropout makes the random state matter
DROPOUT = {"lora": {"r": 4, "alpha": 8, "dropout": 0.1}}


@pytest.fixture
def make_trl_run(make_run: MakeRun) -> MakeRun:
    def make(name: str = "run", settings: dict[str, Any] | None = None, **others: Any) -> Run:
        run = make_run(name, settings, **others)
        tiny_tokenizer.make().save_pretrained(run.paths.base_model)
        return run

    return make


def use_preferences(run: Run) -> None:
    """A pair in each row, in place of documents; for objective kto, its first document with a label."""
    shutil.rmtree(run.paths.dataset_path, ignore_errors=True)
    sizes: tuple[tuple[SplitName, int], ...] = (("train", 30), ("validation", 5))
    for split, pairs in sizes:
        write_pairs(run.paths.dataset_path / split, pairs, len(split), "none")
        if run.config.training.objective == "kto":
            write_labels(run.paths.dataset_path, split, np.arange(pairs) % 3 > 0)
    (run.paths.dataset_path / "report.json").write_text("{}")


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


@pytest.mark.parametrize("family", [*sorted({*DENSE} - {"llama"}), "qwen3_moe"])
def test_every_type_trains_as_with_engine_torch(make_trl_run: MakeRun, family: str) -> None:
    """Its packed documents do not see one another, and TRL's loss is the model's own."""
    sizes = SIZES | {"vocab_size": 128} | MIXTURES.get(family, {})
    model = AutoConfig.for_model(family, **sizes | SETTINGS[family])
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda.is_available() is false")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("settings", [TRL, FULL, TRL | DPO, TRL | {"trl": {"torch_compile": True}}])
def test_a_gpu_gives_the_losses_of_a_cpu(make_trl_run: MakeRun, settings: dict[str, Any], precision: str) -> None:
    """With flex attention, or SDPA where that is not the engine's choice, instead of eager attention."""
    model = AutoConfig.for_model("llama", **SIZES | {"vocab_size": 128, "hidden_size": 64, "head_dim": 16})
    curves = []
    for instance in ("local", "p5.4xlarge"):
        changes = {"cluster.instance_type": instance, "training.precision": precision}
        run = make_trl_run(instance, settings | changes, model=model, max_length=48)
        if "dpo" in settings:
            use_preferences(run)
        try:
            train_here(run)
        finally:
            torch.use_deterministic_algorithms(False)
        curves.append([row[1] for row in curve(run)])
    assert curves[0] == pytest.approx(curves[1], rel=1e-4 if precision == "fp32" else 1e-2)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_preferences_train_as_with_engine_torch(make_trl_run: MakeRun, method: str) -> None:
    """Adapters begin with other random numbers, so that only the first step of theirs is the same."""
    dpo = DPO | {"training.method": method, "dataset.validation_share": 0.1, "training.validate_every_steps": 3}
    found = []
    for name in ("trl", "torch"):
        run = make_trl_run(name, TRL | dpo | {"engine": name, "training.max_steps": 6}, max_length=48)
        use_preferences(run)
        train_here(run)
        found.append(metrics(run))
    same, names = 1, ["loss", "rewards/margins", "rewards/accuracies"]
    if method == "full":
        same, names = 6, [*names, "validation_loss", "grad_norm"]
    for name in names:
        ours, theirs = ([row[name] for row in rows if row[name] is not None] for rows in found)
        assert len(ours) == len(theirs) and ours[:same] == pytest.approx(theirs[:same], rel=1e-4, abs=1e-6), name
    assert found[0][-1]["loss"] < found[0][0]["loss"]


def test_magnitudes_do_not_decay(make_trl_run: MakeRun, tmp_path: Path) -> None:
    """As with engine torch, only matrices do."""
    run = make_trl_run(settings=TRL | {"lora": {"r": 4, "dora": True}})
    rows, order = PackedSplit(run.paths.dataset_path / "train"), numbered(DataOrder(24, 42, 4, 2, 1), 4)
    with ExitStack() as ends:
        trainer, _ = loop.trainers.build(task_of(run), rows, order, 4, tmp_path / "trainer", TrainerCallback(), ends)
    groups = trainer.create_optimizer().param_groups
    decays = {(parameter.ndim, group["weight_decay"]) for group in groups for parameter in group["params"]}
    assert decays == {(1, 0.0), (2, 0.1)}


def test_a_restart_changes_no_loss(make_trl_run: MakeRun) -> None:
    run = make_trl_run(settings=TRL | DROPOUT | {"training.max_steps": 6, "training.save_every_steps": 2})
    train_here(run)
    whole = curve(run)
    assert [path.name for path in sorted(run.paths.checkpoints.iterdir())] == ["step-00000004", "step-00000006"]
    again_from(run, 4)
    assert train_here(run).facts["resumed_from"] == [4] and curve(run) == whole


@pytest.mark.parametrize("method", ["lora", "full"])
def test_bf16_learns_with_fp32_masters(make_trl_run: MakeRun, method: str) -> None:
    settings = {"training.precision": "bf16", "training.method": method, "training.max_steps": 20}
    settings |= {"lora": {"r": 4, "modules_to_save": ["lm_head"]}, "training.learning_rate": 1e-2}
    run = make_trl_run(settings=TRL | settings, rows=8)
    facts = train_here(run).facts
    assert facts["final_loss"] < 0.9 * facts["first_loss"]
    name = "adapter_model" if method == "lora" else "model"
    saved = load_file(run.paths.checkpoint(20) / f"{name}.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


def test_recomputed_activations_change_no_loss(make_trl_run: MakeRun) -> None:
    curves = []
    for name in ("none", "full"):
        run = make_trl_run(name, TRL | DROPOUT | {"training.activation_checkpointing": name})
        train_here(run)
        curves.append([value for _, *values in curve(run) for value in values])
    assert curves[0] == pytest.approx(curves[1], rel=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"training.method": "full"},
        {"lora": {"r": 4, "alpha": 8, "rslora": True, "dora": True}},
        {"lora": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}},
    ],
    ids=["full", "dora", "whole"],
)
def test_the_tuned_model_is_what_was_trained(make_trl_run: MakeRun, settings: dict[str, Any]) -> None:
    run = make_trl_run(settings=TRL | settings)
    train_here(run)
    consolidate.work(run)
    ids = torch.arange(20)[None]
    written = run.paths.checkpoint(4)
    if "lora" in settings:
        merge.work(run)
        base = AutoModelForCausalLM.from_pretrained(run.paths.base_model)
        trained = PeftModel.from_pretrained(base, written)
    else:
        trained = AutoModelForCausalLM.from_pretrained(written)
    tuned = AutoModelForCausalLM.from_pretrained(run.paths.tuned_model)
    with torch.no_grad():
        assert torch.allclose(tuned(ids).logits, trained(ids).logits, atol=1e-5)
    start, end = (load_file(path / "model.safetensors") for path in (run.paths.base_model, run.paths.tuned_model))
    changed = {name.split(".")[-2] for name in end if not torch.equal(start[name], end[name])}
    wanted = {"q_proj", "embed_tokens", "lm_head"} if "modules_to_save" in settings.get("lora", {}) else {"q_proj"}
    assert wanted <= changed


@pytest.mark.parametrize(("method", "objective"), [("lora", "dpo"), ("full", "sft")])
def test_sharded_ranks_train_save_and_resume_as_one(
    make_trl_run: MakeRun, trl_jobs: Jobs, tmp_path: Path, method: str, objective: str
) -> None:
    settings = TRL | (DPO if objective == "dpo" else {})
    settings |= {"training.method": method, "training.max_steps": 6, "training.save_every_steps": 2}
    settings |= {"training.validate_every_steps": 3, "training.keep_best": True, "dataset.validation_share": 0.1}
    tied = tiny_llama(tie_word_embeddings=method == "full")
    alone = make_trl_run("alone", settings, model=tied)
    trl_jobs.environment |= rules.variables(alone.config, tmp_path)  # a checkpoint is read without unpickling objects
    two = {"parallelism": {"ranks_per_node": 2}, "training.micro_batch_size": 1}
    sharded = make_trl_run("sharded", settings | two, model=tied)
    for run in (alone, sharded):
        if objective == "dpo":
            use_preferences(run)
        else:
            write_rows(run.paths.dataset_path / "validation", 5, 32, seed=1)

    def train_sharded() -> None:
        job = trl_jobs.start(2, ["trl_sharding_worker", "zero3", str(sharded.paths.directory)])
        assert job.wait() == 0, job.text()

    train_here(alone)
    train_sharded()
    whole = curve(sharded)
    for ours, theirs in zip(whole, curve(alone), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    validations = [
        [row["validation_loss"] for row in metrics(run) if row["validation_loss"]] for run in (alone, sharded)
    ]
    assert validations[0] == pytest.approx(validations[1], rel=1e-4)
    (sharded.paths.checkpoint(6) / "checkpoint.json").unlink()
    train_sharded()
    assert curve(sharded) == whole
    tuned = []
    for run in (alone, sharded):
        consolidate.work(run)
        result = run.paths.adapter / "adapter_model" if method == "lora" else run.paths.tuned_model / "model"
        tuned.append(load_file(result.with_suffix(".safetensors")))
    assert tuned[0].keys() == tuned[1].keys()
    for name, tensor in tuned[0].items():
        # AdamW moves a weight with a tiny gradient by as much as others, in either direction
        assert float((tensor - tuned[1][name]).abs().max()) < 1e-3, name


@pytest.mark.parametrize("others", [{"training.micro_batch_size": 1}, KTO, REWARD], ids=["sft", "kto", "reward"])
def test_kill_9_of_two_ranks_changes_no_loss(make_trl_run: MakeRun, trl_jobs: Jobs, others: dict[str, Any]) -> None:
    settings = TRL | DROPOUT | {"parallelism": {"ranks_per_node": 2}} | others
    settings |= {"training.max_steps": 12, "training.save_every_steps": 4}
    model = SCORES if others == REWARD else None
    undisturbed, killed = (
        make_trl_run(name, settings, model=model, max_length=48) for name in ("undisturbed", "killed")
    )
    for run in (undisturbed, killed):
        if run.config.training.objective != "sft":
            use_preferences(run)
    trl_jobs.train(undisturbed)
    trl_jobs.start_held(killed, after_step=6).kill()
    said = trl_jobs.train(killed)
    assert "from step 4\n" in said and curve(killed) == curve(undisturbed)
    assert [row["step"] for row in metrics(killed)] == list(range(1, 13))
    record = killed.journal.record("train")
    assert record is not None
    parts = record.facts["held"]["parts"]
    assert min(parts[part] for part in ("start", "step", "save")) > 0 and record.facts["goodput"] < 1


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_stops_after_the_step_which_is_saved(
    make_trl_run: MakeRun, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    begin = StepsFollower.on_step_begin

    def interrupted(self: StepsFollower, args: Any, state: Any, control: Any, **passed: Any) -> None:
        if state.global_step == 2:
            os.kill(os.getpid(), number)
        begin(self, args, state, control, **passed)

    whole, run = (make_trl_run(name, TRL | DROPOUT | {"training.max_steps": 6}) for name in ("whole", "stopped"))
    train_here(whole)
    with monkeypatch.context() as patched, pytest.raises(Interrupted) as stopped:
        patched.setattr(StepsFollower, "on_step_begin", interrupted)
        train_here(run)
    assert stopped.value.step == 3 and stopped.value.saved and stopped.value.exit_status == 128 + number
    assert train_here(run).facts["resumed_from"] == [3] and curve(run) == curve(whole)


def test_the_best_weights_become_the_model_and_training_stops_early(
    make_trl_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = FULL | {"training.max_steps": 30, "training.learning_rate": 5e-2, "training.sanity_steps": 0}
    settings |= {"dataset.validation_share": 0.1, "training.validate_every_steps": 1, "training.keep_best": True}
    run = make_trl_run(settings=settings | {"training.early_stopping_patience": 2}, rows=4)
    write_rows(run.paths.dataset_path / "validation", 5, 32, seed=9)
    facts = train_here(run).facts
    assert facts["stopped_early"] and facts["steps"] == facts["best_step"] + 2 < 30
    assert "the validation loss was lowest" in capsys.readouterr().out
    assert sorted(path.name for path in run.paths.checkpoints.iterdir()) == [
        "best",
        f"step-{facts['steps']:08d}",
    ]
    # a finished training is not repeated
    run.paths.record_path("train").unlink()
    assert train_here(run).facts["steps"] == facts["steps"]
    consolidate.work(run)
    tuned, best = (load_file(path / "model.safetensors") for path in (run.paths.tuned_model, run.paths.best_checkpoint))
    assert tuned.keys() == best.keys() and all(torch.equal(tuned[name], best[name]) for name in tuned)


def test_only_the_weights_are_saved_when_they_alone_are_wanted(make_trl_run: MakeRun) -> None:
    run = make_trl_run(settings=TRL | {"training.save_only_model": True, "training.save_every_steps": 1})
    train_here(run)
    assert [path.name for path in run.paths.checkpoints.iterdir()] == ["step-00000004"]
    assert not list(run.paths.checkpoint(4).glob("*.pt")) and not list(run.paths.checkpoint(4).glob("rng*"))
    consolidate.work(run)


def test_a_full_volume_is_one_line(make_trl_run: MakeRun, train_program: TrainProgram) -> None:
    run = make_trl_run(settings=TRL)
    with small_volume(run.paths.checkpoints, 32 << 10):
        status, said = train_program(run)
    assert status == 2 and run.journal.record("train") is None
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "the checkpoint cannot be written: " in errors[0], said


def test_errors_that_may_pass_are_not_those_of_the_volume(tmp_path: Path) -> None:
    """Such as one of a program that the training starts: an attempt after it may do better."""
    for code, kind in ((errno.ENOSPC, UserError), (errno.EIO, OSError), (errno.ECONNRESET, OSError)):
        with pytest.raises(kind), reporting_full_volumes(tmp_path):
            raise OSError(code, os.strerror(code))


def test_a_damaged_file_is_not_consolidated(make_trl_run: MakeRun) -> None:
    run = make_trl_run(settings=TRL)
    train_here(run)
    file = run.paths.checkpoint(4) / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"adapter_model\.safetensors is damaged"):
        consolidate.work(run)
