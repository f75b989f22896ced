"""Stage generate: both models' answers and losses, and the failure when the training changed nothing."""

import json
import math
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.data import tokenizer as tokenizers
from hyperpod_ft.data.mixing.mixture import spread
from hyperpod_ft.data.mixing.source_report import SourceReport
from hyperpod_ft.data.packing import PackedRows
from hyperpod_ft.data.prepared import PreparedDataset
from hyperpod_ft.data.text import formats, run_prompts
from hyperpod_ft.errors import UserError
from hyperpod_ft.evaluation.answers import as_text
from hyperpod_ft.evaluation.greedy import answers
from hyperpod_ft.evaluation.loss import document_losses, mean_loss
from hyperpod_ft.runs.results.samples import AnswerCount, RecordedAnswers, SampledRow, Samples
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import generate
from tests.unit import tiny_checkpoints
from tests.unit.tiny_tokenizer import make


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.base_model(tmp_path_factory.mktemp("base") / "model", spread=0.4)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.base_model(tmp_path_factory.mktemp("other") / "model", seed=1, spread=0.4)


def greedy_by_hand(model: Any, ids: list[int], count: int) -> list[int]:
    made: list[int] = []
    with torch.inference_mode():
        for _ in range(count):
            token = int(model(torch.tensor([ids + made])).logits[0, -1].argmax())
            if token == 1:
                break
            made.append(token)
    return made


def test_batched_answers_are_the_single_ones(base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    # what Llama 3's own generation_config.json asks for must not matter
    model.generation_config.update(do_sample=True, temperature=5.0, top_p=0.9, repetition_penalty=3.0)
    tokenizer = tokenizers.load(base)
    prompts = [[0, 40, 41], [0, 7], list(range(20, 60)), [0, 300, 9, 9]]
    found = answers(model, tokenizer, prompts, 8)
    assert [list(answer.ids) for answer in found] == [greedy_by_hand(model, prompt, 8) for prompt in prompts]
    assert [answer.text for answer in found] == [
        AutoTokenizer.from_pretrained(base).decode(answer.ids, skip_special_tokens=True) for answer in found
    ]


def split_of(documents: list[list[list[int]]], length: int) -> PackedRows:
    """Rows of documents, padded; the first token of each has no label."""
    ids, labels, positions = (np.zeros((len(documents), length), np.int32) for _ in range(3))
    labels[:] = -100
    for row, parts in enumerate(documents):
        column = 0
        for part in [*parts, [1] * (length - sum(map(len, parts)))]:
            end = column + len(part)
            ids[row, column:end], positions[row, column:end] = part, range(len(part))
            if part in parts:
                labels[row, column + 1 : end] = part[1:]
            column = end
    return PackedRows(ids, labels, positions)


def test_loss_of_packed_rows_is_that_of_their_documents(base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    documents = [[[0, 5, 6, 7, 8], [0, 9, 10]], [[0, 11, 12, 13, 14, 15, 16]]]
    found = mean_loss(model, split_of(documents, 12), max_rows=10)
    total, tokens = 0.0, 0
    for document in [document for row in documents for document in row]:
        with torch.inference_mode():
            loss = model(torch.tensor([document]), labels=torch.tensor([document])).loss
        total, tokens = total + float(loss) * (len(document) - 1), tokens + len(document) - 1
    assert found is not None and (found.tokens, found.rows, found.rows_available) == (tokens, 2, 2)
    assert found.mean == pytest.approx(total / tokens, rel=1e-5)


def test_loss_is_over_a_bounded_number_of_rows(base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    split = split_of([[[0, 5, 6]], [[0, 7, 8]], [[0, 9, 9]]], 4)
    found = mean_loss(model, split, max_rows=2)
    assert found is not None and (found.tokens, found.rows, found.rows_available) == (4, 2, 3)
    assert (
        mean_loss(model, PackedRows(split.input_ids, np.full_like(split.labels, -100), split.position_ids), 3) is None
    )


def prepared_run(tmp_path: Path, base: Path, tuned: Path, *, validation: bool = True, **wanted: Any) -> Run:
    run = tiny_checkpoints.run_on(tmp_path, base, generate={"max_new_tokens": 6} | wanted)
    run.paths.dataset_path.mkdir(parents=True)
    rows = [("train", f"t{number}", "right") for number in range(12)]
    rows += [("validation", f"v{number}", "right") for number in range(12)] if validation else []
    samples = [
        {"split": split, "prompt": prompt, "completion": completion, "templated": prompt == "t0"}
        for split, prompt, completion in rows
    ]
    (run.paths.dataset_path / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    (run.paths.dataset_path / "report.json").write_text("{}")
    if validation:
        (run.paths.dataset_path / "validation").mkdir()
        split = split_of([[[0, 5, 6, 7], [0, 8, 9]]] * 3, 10)
        for name in ("input_ids", "labels", "position_ids"):
            np.save(run.paths.dataset_path / "validation" / f"{name}.npy", getattr(split, name))
    run.paths.directory.mkdir(parents=True)
    run.paths.tuned_model.symlink_to(tuned)
    return run


def test_side_by_side(base: Path, other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["plain text", {"prompt": "a row", "completion": "not needed"}, {"prompt": "without completion"}]
    wanted = {"train_samples": 5, "validation_samples": 3, "answer_pattern": "(?s)^.{3}", "rouge": True}
    run = prepared_run(tmp_path, base, other, prompts=prompts, **wanted)
    model = AutoModelForCausalLM.from_pretrained(other).eval()
    tokenizer = AutoTokenizer.from_pretrained(other)

    def tuned_answer(prompt: str) -> str:
        by_hand = greedy_by_hand(model, tokenizer(prompt)["input_ids"], 6)
        return str(tokenizer.decode(by_hand, skip_special_tokens=True))

    path = run.paths.dataset_path / "samples.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["completion"] = tuned_answer("t1")[:3] + ", and it ends in another way"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = generate.work(run)
    assert done.outputs == (run.paths.samples_path,)
    found = json.loads(run.paths.samples_path.read_text())
    assert [row["prompt"] for row in found["prompts"]] == ["plain text", "a row", "without completion"]
    assert [row["prompt"] for row in found["samples"]] == ["t0", "t1", "t2", "t3", "t4", "v0", "v1", "v2"]
    # a server that is asked the same must know whether the prompt has its special tokens
    assert [row["templated"] for row in (*found["prompts"], *found["samples"])] == [*[False] * 3, True, *[False] * 7]
    assert found["exact_match"]["train"] == {"rows": 5, "base": 0, "tuned": 0}
    assert found["answers"] == 11 and 0 < found["answers_changed"] <= 11
    losses = found["validation_loss"]
    assert losses["base"]["tokens"] == losses["tuned"]["tokens"] == 15
    assert losses["base"]["mean"] != losses["tuned"]["mean"]
    assert done.facts["validation_loss"] == losses

    assert found["prompts"][0]["tuned"] == tuned_answer("plain text")

    printed = capsys.readouterr().out
    assert "plain text" in printed and "| tuned" in printed and "validation loss: base" in printed
    assert "exact answers, train rows: base 0/5, tuned 0/5" in printed
    assert "answers by pattern, train rows: base 0/5, tuned 1/5" in printed
    assert "ROUGE-1/2/L, train rows: base 0.000/0.000/0.000, tuned 0." in printed
    assert [done.facts["rouge"][split]["rows"] for split in ("train", "validation")] == [5, 3]
    assert done.facts["pattern_match"]["validation"] == {"rows": 3, "base": 0, "tuned": 0}


def test_a_text_is_continued_for_as_long_as_an_answer_can_be(base: Path, other: Path, tmp_path: Path) -> None:
    run = tiny_checkpoints.run_on(tmp_path, base, generate={"max_new_tokens": 4}, dataset={"format": "text"})
    run.paths.dataset_path.mkdir(parents=True)
    sample = {"split": "train", "prompt": "the quick", "completion": " brown fox how many clips", "templated": False}
    (run.paths.dataset_path / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    (run.paths.dataset_path / "report.json").write_text("{}")
    run.paths.directory.mkdir(parents=True)
    run.paths.tuned_model.symlink_to(other)
    generate.work(run)
    (row,) = json.loads(run.paths.samples_path.read_text())["samples"]
    tokenizer = AutoTokenizer.from_pretrained(base)
    whole = tokenizer(sample["completion"], add_special_tokens=False)["input_ids"]
    assert row["prompt"] == "the quick"
    assert row["expected"] == tokenizer.decode(whole[:4]) != sample["completion"]


def test_a_model_that_did_not_change_is_refused(base: Path, tmp_path: Path) -> None:
    run = prepared_run(tmp_path, base, base, prompts=["plain text"])
    with pytest.raises(UserError, match=r"all 17 prompts, and has the same .*training\.learning_rate"):
        generate.work(run)
    assert not run.paths.samples_path.exists()


def test_equal_answers_alone_are_no_error(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a short training the first tokens may be those of before, and the loss is not."""
    tuned = tmp_path / "tuned"
    shutil.copytree(base, tuned)
    tensors = load_file(tuned / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 1.01  # the same order of all tokens
    save_file(tensors, tuned / "model.safetensors", metadata={"format": "pt"})
    run = prepared_run(tmp_path, base, tuned, prompts=["plain text"])
    facts = generate.work(run).facts
    assert facts["answers_changed"] == 0 and run.paths.samples_path.exists()
    assert facts["validation_loss"]["base"] != facts["validation_loss"]["tuned"]
    assert "both models give the same answers to all 17 prompts" in capsys.readouterr().out


@pytest.mark.parametrize("model_type", ["gptj", "gpt_neox", "mpt"])
def test_documents_do_not_see_one_another(model_type: str) -> None:
    """Also in families that would let them, when they get the row as a whole."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    own = {"d_model": 32, "n_layers": 2, "n_heads": 4} if model_type == "mpt" else {"num_attention_heads": 4}
    rotary = {"rotary_dim": 4} if model_type == "gptj" else {}
    config = AutoConfig.for_model(model_type, **sizes | own | rotary | {"initializer_range": 0.5})
    model = AutoModelForCausalLM.from_config(config).eval()
    documents = [[[5, 6, 7, 8, 9], [9, 10, 4]], [[11, 12, 13, 14, 15, 16, 17]]]
    found = document_losses(model, split_of(documents, 12), max_rows=9)
    for document, loss in zip(documents[0] + documents[1], found.summed, strict=True):
        with torch.inference_mode():
            mean = model(torch.tensor([document]), labels=torch.tensor([document])).loss
        assert loss == pytest.approx(float(mean) * (len(document) - 1), rel=1e-4)


def test_the_loss_of_preferences(base: Path, other: Path, tmp_path: Path) -> None:
    """That of DPO, whose reference is the base model; by hand from the log-probabilities of both documents."""
    run = prepared_run(tmp_path, base, other)
    settings = {"training": {"objective": "dpo"}, "dataset": {"format": "preference"}, "dpo": {"beta": 0.02}}
    values = run.config.model_dump()
    for section, changes in settings.items():
        values[section] |= changes
    config = RunConfig.model_validate(values)
    run = replace(run, config=config)
    losses = generate.work(run).facts["validation_loss"]
    assert losses["base"]["mean"] == pytest.approx(math.log(2)) and losses["tuned"]["tokens"] == 15
    rewards = []
    for document in ([0, 5, 6, 7], [0, 8, 9]):
        likely = []
        for directory in (base, other):
            model = AutoModelForCausalLM.from_pretrained(directory).eval()
            with torch.inference_mode():
                loss = model(torch.tensor([document]), labels=torch.tensor([document])).loss
            likely.append(-float(loss) * (len(document) - 1))
        rewards.append(0.02 * (likely[1] - likely[0]))
    assert losses["tuned"]["mean"] == pytest.approx(math.log1p(math.exp(rewards[1] - rewards[0])), rel=1e-4)


@pytest.mark.parametrize("dataset_format", ["chat", "preference"])
def test_a_text_is_what_the_user_says_where_rows_are_chats(dataset_format: str) -> None:
    dataset = Dataset(source="./rows", format=dataset_format)  # type: ignore[arg-type]
    key = "messages" if dataset_format == "chat" else "prompt"
    said = [{"role": "user", "content": "hello"}]
    for prompt in ("hello", {key: "hello"}, {key: said}):
        row = run_prompts.as_chat(dataset, prompt)  # type: ignore[arg-type]
        assert row == {key: said}
        assert formats.prompt_of(dataset, row, make()) == make().apply_chat_template(
            said, tokenize=False, add_generation_prompt=True
        )


def test_without_questions_only_losses_are_compared(
    base: Path, other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = prepared_run(tmp_path, base, other, train_samples=0, validation_samples=0)
    generate.work(run)
    assert "comparing only the losses" in capsys.readouterr().out
    assert json.loads(run.paths.samples_path.read_text())["validation_loss"] is not None


def test_losses_of_sources_make_the_loss_of_all(base: Path, other: Path, tmp_path: Path) -> None:
    run = prepared_run(tmp_path, base, other, train_samples=0, validation_samples=0)
    generate.work(run)
    alone = Samples.read(run.paths.samples_path)
    split = PreparedDataset.open(run.paths.dataset_path).split("validation")
    assert isinstance(split, PackedRows) and not alone.source_losses and alone.validation_loss
    rows = {"chats": len(split) - 1, "books": 1, "none": 0}
    counts = dict.fromkeys((field.name for field in fields(SourceReport)), 0)
    sources = [counts | {"name": name, "validation_rows": count} for name, count in rows.items()]
    (run.paths.dataset_path / "report.json").write_text(json.dumps({"sources": sources}))
    generate.work(run)
    found = Samples.read(run.paths.samples_path)
    assert found.validation_loss and [*found.source_losses] == ["chats", "books"]
    for model in ("base", "tuned"):
        of_all, before = getattr(found.validation_loss, model), getattr(alone.validation_loss, model)
        assert of_all.mean == pytest.approx(before.mean, rel=1e-6)
        assert replace(of_all, mean=0.0) == replace(before, mean=0.0)
        own = spread([len(split) - 1, 1]) == 1
        part = PackedRows(split.input_ids[own], split.labels[own], split.position_ids[own])
        directory = {"base": run.paths.base_model, "tuned": run.paths.tuned_model}[model]
        expected = mean_loss(AutoModelForCausalLM.from_pretrained(directory).eval(), part, 1)
        assert getattr(found.source_losses["books"], model).mean == pytest.approx(expected.mean, rel=1e-5)
    assert "validation loss, books: base" in as_text(found)


def test_without_validation_the_loss_is_null(base: Path, other: Path, tmp_path: Path) -> None:
    run = prepared_run(tmp_path, base, other, validation=False)
    generate.work(run)
    assert json.loads(run.paths.samples_path.read_text())["validation_loss"] is None


def test_a_model_without_one_of_its_tensors_is_not_filled_with_random_numbers(base: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(base, damaged)
    tensors = load_file(damaged / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    run = prepared_run(tmp_path, base, damaged, prompts=["plain text"])
    with pytest.raises(
        UserError, match=r"merged: 1 of the model's tensors are missing: model\.layers\.0\.mlp\.up_proj"
    ):
        generate.work(run)


def test_a_row_that_is_none_is_named(base: Path, other: Path, tmp_path: Path) -> None:
    run = prepared_run(tmp_path, base, other, prompts=["fine", {"question": "what?"}])
    with pytest.raises(UserError, match=r"generate\.prompts\.1: missing field 'prompt'"):
        generate.work(run)


def test_exact_answers_and_control_characters_in_the_log() -> None:
    rows = [
        SampledRow.of("train", RecordedAnswers("p", False, " right\n", "\x1b[2Jright"), "right"),
        SampledRow.of("train", RecordedAnswers("p", False, "wrong", "right"), "right "),
    ]
    samples = Samples.of([], rows, answers_changed=2, validation_loss=None)
    assert samples.exact_match["train"] == AnswerCount(rows=2, base=1, tuned=1)
    shown = as_text(samples)
    assert "\x1b" not in shown and "?[2Jright" in shown
    assert "base = " in shown and "| tuned =" in shown
