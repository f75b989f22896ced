"""Direct preference optimization: as plain transformers on padded pairs, in every layout; and it is learned."""

import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layouts_worker import filled_value
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid
from transformers import AutoConfig, AutoModelForCausalLM

from hyperpod_ft.data.packing import IGNORED, How, fill, pack
from hyperpod_ft.engines.batches import DataOrder, PreferenceSplit
from hyperpod_ft.engines.torch.objectives import reference
from hyperpod_ft.engines.torch.objectives.reference import store
from hyperpod_ft.planning.lora import targets
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import consolidate
from tests.tasks import task_of
from tests.training.conftest import VOCABULARY, Jobs, MakeRun, curve, metrics, tiny_llama, train_here
from tests.training.test_layouts import differences, engine_name
from tests.unit.tiny_families import MIXTURES, SIZES

pytestmark = pytest.mark.training

BETA = 0.2
PAD, LENGTH, ROWS_PER_STEP = 0, 48, 8
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")


def write_pairs(directory: Path, pairs: int, seed: int, how: How = "bfd") -> None:
    """Packed pairs with random prompts; a chosen completion has low tokens, and a rejected one high ones."""
    random = np.random.default_rng(seed)
    ids, trained, lengths = [], [], []
    for _ in range(pairs):
        prompt = random.integers(3, VOCABULARY, random.integers(2, 7))
        for low, high in ((3, VOCABULARY // 2), (VOCABULARY // 2, VOCABULARY)):
            completion = random.integers(low, high, random.integers(1, 9))
            ids += [prompt, completion]
            trained += [np.zeros(len(prompt), np.bool_), np.ones(len(completion), np.bool_)]
            lengths.append(len(prompt) + len(completion))
    counts = np.array(lengths, np.int64)
    order = random.permutation(pairs)
    spans = ((counts.cumsum() - counts).reshape(-1, 2)[order], counts.reshape(-1, 2)[order])
    layout = pack(how, *spans, LENGTH, seed)
    stream = np.concatenate(ids).astype(np.int32), np.concatenate(trained)
    rows = fill(layout, *stream, 0, layout.row_count, LENGTH, PAD)
    directory.mkdir(parents=True)
    for name in ("input_ids", "labels", "position_ids"):
        np.save(directory / f"{name}.npy", getattr(rows, name))


@pytest.fixture
def make_preferring(make_run: MakeRun) -> MakeRun:
    def make(name: str = "run", settings: dict[str, Any] | None = None, **more: Any) -> Run:
        base = {
            "dpo": {"beta": BETA},
            "dataset.format": "preference",
            "training.objective": "dpo",
            "training.max_steps": 4,
        }
        run = make_run(name, base | (settings or {}), max_length=LENGTH, **more)
        if (run.paths.dataset_path / "train" / "input_ids.npy").exists() and not (
            run.paths.dataset_path / "validation"
        ).exists():
            shutil.rmtree(run.paths.dataset_path / "train")  # rows of single documents
            write_pairs(run.paths.dataset_path / "train", 90, seed=1)
            write_pairs(run.paths.dataset_path / "validation", 25, seed=2)
        return run

    return make


def pairs_of(split: Path, rows: np.ndarray | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and labels of each document, in order."""
    arrays = [np.load(split / f"{name}.npy").astype(np.int64) for name in ("input_ids", "labels", "position_ids")]
    found = []
    for ids, labels, positions in zip(*(array if rows is None else array[rows] for array in arrays), strict=True):
        starts = np.flatnonzero(positions == 0)
        for start, end in zip(starts, [*starts[1:], LENGTH], strict=True):
            if (labels[start:end] != IGNORED).any():
                found.append((torch.from_numpy(ids[start:end]), torch.from_numpy(labels[start:end])))
    return found


def log_probabilities(model: Any, documents: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Of padded documents, as every other program computes them."""
    longest = max(len(ids) for ids, _ in documents)
    ids, labels = (
        torch.stack([torch.nn.functional.pad(each, (0, longest - len(each)), value=value) for each in column])
        for column, value in zip(zip(*documents, strict=True), (PAD, IGNORED), strict=True)
    )
    mask = torch.stack([(torch.arange(longest) < len(of)).long() for of, _ in documents])
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    wanted = labels[:, 1:]
    each = logits.log_softmax(-1).gather(2, wanted.clamp(min=0)[..., None])[..., 0]
    return torch.where(wanted != IGNORED, each, 0).sum(1)


def dpo_loss(model: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """TRL's `sigmoid` loss (dpo_trainer.py, _compute_loss)."""
    ratios = model - reference
    return -logsigmoid(BETA * (ratios[::2] - ratios[1::2])).mean()


def store_reference(run: Run) -> torch.Tensor:
    """Reference log-probabilities that differ from the model's, as after some training."""
    random, stored = np.random.default_rng(5), {}
    for name in ("train", "validation"):
        count = len(pairs_of(run.paths.dataset_path / name))
        stored[name] = (-30 + 8 * random.standard_normal(count)).astype(np.float32)
    store(task_of(run), stored)
    return torch.from_numpy(stored["train"])


def plain(run: Run) -> dict[str, torch.Tensor]:
    """Loss and gradients of the first step in one process: transformers, PEFT and TRL's formula, nothing packed."""
    lora = run.config.lora
    model = AutoModelForCausalLM.from_pretrained(run.paths.base_model, attn_implementation="eager", dtype=torch.float32)
    if run.config.training.method == "lora":
        adapters = LoraConfig(
            r=lora.r,
            lora_alpha=lora.alpha,
            target_modules=list(targets(lora, "llama")),
            use_dora=lora.dora,
            use_rslora=lora.rslora,
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model, adapters)
    trained = {engine_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        if run.config.training.method == "lora":
            value = filled_value(name, parameter.shape, run.config.seed)
            parameter.data = parameter.data if value is None else value
    split = PreferenceSplit(run.paths.dataset_path / "train")
    rows = DataOrder(len(split), run.config.seed, ROWS_PER_STEP, 1, 1).step(1)
    reference = torch.from_numpy(np.load(run.paths.reference_log_probabilities / "train.npy"))[split.documents_of(rows)]
    loss = dpo_loss(log_probabilities(model, pairs_of(run.paths.dataset_path / "train", rows)), reference)
    loss.backward()
    gradients = {f"gradient.{name}": p.grad for name, p in trained.items() if p.grad is not None}
    return {"loss": loss.detach().double()[None]} | gradients


def layout(sharding: str, tensor_parallel: int, accumulation: int) -> dict[str, Any]:
    micro_batch_size = ROWS_PER_STEP * tensor_parallel // 4 // accumulation
    return {
        "parallelism": {"ranks_per_node": 4, "tensor_parallel": tensor_parallel, "sharding": sharding},
        "training.micro_batch_size": micro_batch_size,
        "training.gradient_accumulation_steps": accumulation,
    }


def test_loss_and_every_gradient_are_those_of_padded_pairs(
    make_preferring: MakeRun, jobs: Jobs, tmp_path: Path
) -> None:
    """LoRA, DoRA and full, whose head is trained too; replicated, ZeRO-1, 2 and 3; TP 2, also of sequences."""
    tied, full = tiny_llama(tie_word_embeddings=True), {"training.method": "full"}
    targets = ("q_proj", "v_proj", "down_proj", "lm_head")
    runs = [
        make_preferring("lora-zero3", layout("zero3", 1, 2)),
        make_preferring("lora-tp2", layout("replicated", 2, 2)),
        make_preferring("dora", layout("zero1", 1, 1) | {"lora.dora": True, "lora.target_modules": targets}),
        make_preferring("rs", layout("zero2", 2, 1) | {"lora.rslora": True, "parallelism.sequence_parallel": True}),
        make_preferring("full", layout("zero3", 1, 1) | full),
        make_preferring("full-tp2", layout("zero1", 2, 2) | full),
        make_preferring("tied", layout("zero2", 1, 2) | full, model=tied),
    ]
    for run in runs:
        store_reference(run)
    job = jobs.start(4, ["layouts_worker", "0", str(tmp_path), *(str(run.paths.directory) for run in runs)])
    assert job.wait() == 0, job.text()
    for run in runs:
        found, expected = load_file(tmp_path / f"{run.config.name}.safetensors"), plain(run)
        found = {name: tensor for name, tensor in found.items() if not name.startswith("parameter")}
        for kind in ("loss", "gradient"):
            worst = differences(found, expected, kind)
            name = max(worst, key=worst.__getitem__)
            print(f"{run.config.name}: {kind}: largest relative difference {worst[name]:.1e}")
            assert worst[name] <= 1e-5, f"{run.config.name}: {name}"


def test_the_reference_is_the_model_before_training(make_preferring: MakeRun) -> None:
    run = make_preferring(settings={"lora": {"r": 4, "alpha": 8, "dropout": 0.3}})
    train_here(run)
    base = AutoModelForCausalLM.from_pretrained(run.paths.base_model, dtype=torch.float32)
    with torch.no_grad():
        expected = log_probabilities(base, pairs_of(run.paths.dataset_path / "validation"))
    found = torch.from_numpy(np.load(run.paths.reference_log_probabilities / "validation.npy"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", [{"dora": True, "rslora": True}, {"quantization": "nf4"}], ids=str)
def test_before_training_the_model_is_its_reference(make_preferring: MakeRun, variant: dict[str, Any]) -> None:
    run = make_preferring(settings={f"lora.{key}": value for key, value in variant.items()} | {"training.max_steps": 2})
    train_here(run)
    first, second = metrics(run)
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-6) != second["loss"]


def test_metrics_are_those_of_the_model_that_was_trained(make_preferring: MakeRun) -> None:
    run = make_preferring(
        settings={"training.method": "full", "training.learning_rate": 1e-3, "training.validate_every_steps": 2}
    )
    facts = train_here(run).facts
    first, *_, last = metrics(run)
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-5) and first["rewards/margins"] == pytest.approx(0)
    assert facts["base_validation_loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert [row["step"] for row in metrics(run) if "validation_rewards/margins" in row] == [2, 4]
    consolidate.work(run)
    documents = pairs_of(run.paths.dataset_path / "validation")
    reference, tuned = (
        AutoModelForCausalLM.from_pretrained(at) for at in (run.paths.base_model, run.paths.tuned_model)
    )
    with torch.no_grad():
        before, after = (log_probabilities(model, documents) for model in (reference, tuned))
    chosen, rejected = (BETA * (after - before)).view(-1, 2).T
    expected = (chosen, rejected, chosen - rejected, (chosen > rejected).float())
    for name, values in zip(REWARDS, expected, strict=True):
        assert last[f"validation_{name}"] == pytest.approx(float(values.mean()), rel=1e-4, abs=1e-5)
        assert facts[f"validation_{name}"] == last[f"validation_{name}"]
    assert last["validation_loss"] == pytest.approx(float(dpo_loss(after, before)), rel=1e-5)
    assert facts["rewards/margins"] == last["rewards/margins"]


def test_a_preference_is_learned(make_preferring: MakeRun) -> None:
    """Held-out pairs have other prompts and completions: low tokens are preferred to high ones."""
    run = make_preferring(settings={"training.max_steps": 40, "training.micro_batch_size": 4})
    facts = train_here(run).facts
    assert facts["validation_rewards/accuracies"] > 0.9
    assert facts["validation_loss"] < 0.6 < math.log(2)


def test_interrupted_is_uninterrupted(make_preferring: MakeRun) -> None:
    settings = {"training.max_steps": 8, "training.save_every_steps": 2, "training.validate_every_steps": 2}
    run = make_preferring(settings=settings | {"training.keep_best": True, "training.keep_checkpoints": 9})
    first = train_here(run)
    whole, rows = curve(run), metrics(run)
    reference = (run.paths.reference_log_probabilities / "train.npy").read_bytes()
    run.paths.record_path("train").unlink()
    for step in (6, 8):
        shutil.rmtree(run.paths.checkpoint(step))
    # measured again, with weights that a checkpoint has not replaced yet
    shutil.rmtree(run.paths.reference_log_probabilities)
    again = train_here(run)
    assert again.facts["resumed_from"] == [4] and curve(run) == whole
    assert (run.paths.reference_log_probabilities / "train.npy").read_bytes() == reference
    for name in [*REWARDS, *(f"validation_{name}" for name in REWARDS)]:
        assert again.facts[name] == first.facts[name]
        assert [row.get(name) for row in metrics(run)] == [row.get(name) for row in rows]


def test_an_interrupted_reference_continues(make_preferring: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured is stored part by part, and with the rest of it as if nothing had happened."""
    run = make_preferring(settings={"training.max_steps": 12})
    train_here(run)
    whole = {
        name: (run.paths.reference_log_probabilities / f"{name}.npy").read_bytes() for name in ("train", "validation")
    }
    run.paths.record_path("train").unlink()
    shutil.rmtree(run.paths.checkpoints)
    shutil.rmtree(run.paths.reference_log_probabilities)
    monkeypatch.setattr(reference, "_PASSES_PER_PART", 2)
    rows: list[int] = []

    def interrupted(module: Any, split: Any, chosen: Any, *others: Any) -> None:
        if len(rows) == 8:
            raise KeyboardInterrupt
        rows.extend(chosen)
        measure(module, split, chosen, *others)

    measure = reference._measure
    monkeypatch.setattr(reference, "_measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_here(run)
    done = np.isfinite(np.load(run.paths.reference_log_probabilities / "train.npy"))
    assert done.any() and not done.all()
    assert int(run.paths.reference_count.read_text()) == done.sum()
    rows.append(-1)  # is not interrupted again
    train_here(run)
    measured = rows[: rows.index(-1)] + rows[rows.index(-1) + 1 :]
    train, validation = (PreferenceSplit(run.paths.dataset_path / name) for name in ("train", "validation"))
    used = [*DataOrder(len(train), run.config.seed, 2, 1, 1).first_rows(12), *range(len(validation))]
    assert sorted(measured) == sorted(used), "each row once"
    assert whole == {name: (run.paths.reference_log_probabilities / f"{name}.npy").read_bytes() for name in whole}


def test_a_stored_reference_is_used_if_it_fits(make_preferring: MakeRun) -> None:
    """Damaged, or of other rows or weights, it is measured again; rows that no step trains on are not measured."""
    run = make_preferring(settings={"training.max_steps": 1})
    train_here(run)
    whole = np.load(run.paths.reference_log_probabilities / "train.npy")
    split = PreferenceSplit(run.paths.dataset_path / "train")
    rows = DataOrder(len(split), run.config.seed, 2, 1, 1).step(1)
    assert sorted(np.flatnonzero(np.isfinite(whole))) == sorted(split.documents_of(rows))

    def spoil() -> Iterator[None]:
        (run.paths.reference_log_probabilities / "train.npy").write_bytes(b"no numpy file")
        yield
        np.save(run.paths.reference_log_probabilities / "train.npy", whole[1:])
        yield
        np.save(run.paths.reference_log_probabilities / "train.npy", np.full_like(whole, np.nan))
        yield
        np.save(run.paths.reference_log_probabilities / "train.npy", whole + 1)
        (run.paths.base_model / "README.md").write_text("another model")
        yield

    for _ in spoil():
        run.paths.record_path("train").unlink()
        shutil.rmtree(run.paths.checkpoints)
        train_here(run)
        assert np.array_equal(np.load(run.paths.reference_log_probabilities / "train.npy"), whole, equal_nan=True)
    run.paths.record_path("train").unlink()
    shutil.rmtree(run.paths.checkpoints)
    np.save(
        run.paths.reference_log_probabilities / "train.npy", whole - np.tile([0, 5], len(whole) // 2).astype(np.float32)
    )
    os.utime(run.paths.base_model / "model.safetensors", (0, 0))  # as on another machine, which got both from a store
    train_here(run)
    assert metrics(run)[0]["rewards/margins"] == pytest.approx(-5 * BETA, rel=1e-4)
    assert (
        json.loads((run.paths.checkpoint(1) / "checkpoint.json").read_text())["progress"]["metrics"]["rewards/margins"]
        < 0
    )


def test_a_mixtures_routers_are_balanced_beside_the_preferences(make_preferring: MakeRun) -> None:
    """The reference is measured without that loss, and validation has none."""
    sizes = SIZES | MIXTURES["qwen3_moe"] | {"vocab_size": VOCABULARY, "initializer_range": 0.3}
    model = AutoConfig.for_model("qwen3_moe", **sizes, output_router_logits=True, router_aux_loss_coef=0.5)
    run = make_preferring(settings={"training.method": "full", "training.validate_every_steps": 2}, model=model)
    train_here(run)
    rows = metrics(run)
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert all(row["aux_loss"] > 2 for row in rows)
    assert rows[-1]["validation_loss"] and not any("validation_aux_loss" in row for row in rows)
