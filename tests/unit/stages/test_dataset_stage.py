"""Stage dataset: what it publishes, that it publishes the same again, and when it publishes nothing."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyperpod_ft.data.inspection import shown
from hyperpod_ft.data.prepared import PreparedDataset
from hyperpod_ft.data.tokenizer import encode, prompt_ids
from hyperpod_ft.errors import UserError
from hyperpod_ft.stages import dataset as stage
from hyperpod_ft.stages.stage import perform
from tests.unit import tiny_t5
from tests.unit.small_volume import small_volume
from tests.unit.stage_runs import finish, finished, tree
from tests.unit.stages.dataset_runs import TOKENIZER, dolly, prepared_run

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def test_unknown_tokens_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """T5's tokenizers have no token for some characters of code, such as braces."""
    rows = [("say red dog", "dog red"), ("say {blue} cat", "cat"), ("say red", "{ red }")]
    text = "".join(json.dumps({"prompt": prompt, "completion": completion}) + "\n" for prompt, completion in rows)
    known = {"format": "prompt-completion", "max_target_length": 16, "validation_share": 0.0}
    run = prepared_run(tmp_path, text.encode(), **known)
    shutil.rmtree(run.paths.base_model)
    tiny_t5.save(run.paths.base_model, ["say red dog blue cat"])
    facts = stage.work(run).facts
    assert (facts["unknown_tokens"], facts["unknown_in"]) == (4, 2)
    printed = capsys.readouterr().out
    assert "unknown tokens: 4, in 2 examples: the tokenizer has no token for some of their characters" in printed


def test_what_is_published(tmp_path: Path) -> None:
    run = prepared_run(tmp_path, dolly(100), validation_share=0.1)
    perform(run, "dataset", stage.work)
    found = PreparedDataset.open(run.paths.dataset_path)
    train, validation = found.split("train"), found.split("validation")
    assert train is not None
    assert validation is not None
    record = run.journal.record("dataset")
    assert record is not None
    assert record.facts == found.report() | {"packing": "bfd"}
    assert {"train_rows", "validation_rows", "tokens"} <= record.facts.keys()
    report = found.report()
    assert (report["rows_read"], report["train_examples"], report["validation_examples"]) == (100, 90, 10)
    assert (report["train_rows"], report["validation_rows"]) == (len(train), len(validation))

    positions = sum(split.input_ids.size for split in (train, validation))
    assert report["padding_share"] == pytest.approx(1 - report["tokens"] / positions, abs=1e-6)
    labels = sum(int((split.labels != -100).sum()) for split in (train, validation))
    assert report["label_tokens"] == labels
    assert isinstance(train.input_ids, np.memmap)

    # each answer is trained once, in its split, with its EOS
    answers = {"train": [], "validation": []}
    for name, split in (("train", train), ("validation", validation)):
        for row in split.labels:
            learned = TOKENIZER.decode(row[row != -100])
            answers[name] += [piece for piece in learned.split("</s>") if piece]
    assert sorted(answers["train"] + answers["validation"]) == sorted(f"answer {n}" for n in range(100))
    samples = {name: [sample.completion for sample in found.samples(name)] for name in ("train", "validation")}
    assert sorted(samples["train"]) == sorted(answers["train"])
    assert sorted(samples["validation"]) == sorted(answers["validation"])
    assert samples["train"] != sorted(samples["train"]), "drawn, not the first"
    first = found.samples("train")[0]
    tokens = [
        *prompt_ids(TOKENIZER, first.prompt),
        *encode(TOKENIZER.backend_tokenizer, [first.completion])[0],
    ]
    assert any(tokens == row[start : start + len(tokens)].tolist() for row in train.input_ids for start in range(40))


def test_samples_are_at_most_256_of_each_split(tmp_path: Path) -> None:
    run = prepared_run(tmp_path, dolly(700), validation_share=0.5, workers=1)
    perform(run, "dataset", stage.work)
    found = PreparedDataset.open(run.paths.dataset_path)
    for split in ("train", "validation"):
        texts = [(sample.prompt, sample.completion) for sample in found.samples(split)]
        assert len(set(texts)) == len(texts) == 256


def test_samples_have_a_prompt(tmp_path: Path) -> None:
    """Servers refuse an empty one, and its answer shows nothing."""
    texts = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in ("the fox", "a", "how many clips"))
    pairs = b'{"prompt": " ", "completion": "b"}\n{"prompt": "how many", "completion": "clips"}\n'
    expected = {"text": {"the": " fox", "how": " many clips"}, "prompt-completion": {"how many": "clips"}}
    for form, rows in (("text", texts), ("prompt-completion", pairs)):
        run = prepared_run(tmp_path / form, rows, format=form, validation_share=0)
        perform(run, "dataset", stage.work)
        found = PreparedDataset.open(run.paths.dataset_path)
        assert {sample.prompt: sample.completion for sample in found.samples("train")} == expected[form]
        assert found.report()["train_examples"] == len(expected[form]) + 1, "all are trained"


def test_a_slice_of_the_rows(tmp_path: Path) -> None:
    run = prepared_run(tmp_path, dolly(50) + b"not JSON\n" * 50, split="train[10%:50%]", validation_share=0.25)
    perform(run, "dataset", stage.work)
    found = PreparedDataset.open(run.paths.dataset_path)
    report = found.report()
    assert (report["rows_read"], report["train_examples"], report["validation_examples"]) == (40, 30, 10)
    answers = {sample.completion for split in ("train", "validation") for sample in found.samples(split)}
    assert answers == {f"answer {n}" for n in range(10, 50)}


def test_no_validation(tmp_path: Path) -> None:
    run = prepared_run(tmp_path, dolly(10), validation_share=0)
    perform(run, "dataset", stage.work)
    found = PreparedDataset.open(run.paths.dataset_path)
    assert found.split("validation") is None
    assert found.samples("validation") == []
    assert not (run.paths.dataset_path / "validation").exists()
    assert found.report()["validation_rows"] == 0


def test_workers_and_chunks_do_not_change_a_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = b'{"bad": 1}\n'.join([dolly(300), dolly(200), dolly(100)])
    trees = []
    for workers in (1, 2, 5):
        run = prepared_run(tmp_path / str(workers), rows, workers=workers, max_bad_rows=2, validation_share=0.1)
        monkeypatch.setattr("hyperpod_ft.data.reading.CHUNK_BYTES", 2000)
        perform(run, "dataset", stage.work)
        trees.append(tree(run.paths.dataset_path))
    assert trees[0] == trees[1] == trees[2]
    assert json.loads(trees[0]["report.json"])["bad_reasons"] == {"missing field 'instruction'": 2}


BAD = (
    b'{"instruction": "a", "context": ""}\n'
    b'{"instruction": "a", "context": "", "response": 5}\n'
    b'{"instruction": "a", "context": "", "response": " "}\n'
    b'{"instruction": "\xff", "context": "", "response": "b"}\n'
    b'{"instruction": "a"\n'
    b'{"instruction": "' + b"the quick " * 50 + b'", "context": "", "response": "b"}\n'
)


def test_too_many_bad_rows_stop_the_stage_and_publish_nothing(tmp_path: Path) -> None:
    run = prepared_run(tmp_path, dolly(10) + BAD, max_bad_rows=5)
    with pytest.raises(UserError) as stopped:
        perform(run, "dataset", stage.work)
    message = str(stopped.value)
    assert message.startswith("6 of 16 rows cannot be used and dataset.max_bad_rows is 5: rows.jsonl:11 (missing field")
    assert re.findall(r"rows\.jsonl:(\d+)", message) == ["11", "12", "13", "14", "15"]
    assert "and 1 more; correct them, or set dataset.max_bad_rows to 6 or more" in message
    assert "dataset.overlong to truncate" in message
    assert not list(run.paths.dataset_path.parent.glob("*/report.json"))
    assert not run.paths.dataset_path.exists()
    assert run.journal.record("dataset") is None


def test_as_many_bad_rows_as_allowed_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = prepared_run(tmp_path, dolly(10) + BAD, max_bad_rows=6)
    perform(run, "dataset", stage.work)
    report = PreparedDataset.open(run.paths.dataset_path).report()
    assert report["bad_reasons"] == {
        "missing field 'response'": 1,
        "field 'response' is not a string": 1,
        "empty completion": 1,
        "invalid UTF-8": 1,
        "invalid JSON": 1,
        "longer than max_length": 1,
    }
    assert (report["bad_rows"], report["rows_used"], report["dropped"]) == (6, 10, 1)
    assert report["bad_listed"][0].startswith("rows.jsonl:11 (missing field 'response': ")
    printed = capsys.readouterr().out
    assert "raw rows: 16 read, 10 used, 6 bad" in printed
    assert "rows.jsonl:16 (longer than max_length: " in printed


@pytest.mark.parametrize(
    ("form", "row", "column"),
    [
        ("prompt-completion", {"prompt": "a", "completion": "b", "images": ["x.png"]}, "images"),
        ("prompt-completion", {"prompt": "a", "completion": "b", "label": False}, "label"),
        ("alpaca", {"instruction": "a", "output": "b", "system": "Be brief."}, "system"),
        ("text", {"text": "a b", "weight": 0.5}, "weight"),
        ("chat", {"messages": CHAT, "images": ["x.png"]}, "images"),
    ],
)
def test_a_column_that_would_change_the_training_stops_the_stage_unless_it_is_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, row: dict[str, Any], column: str
) -> None:
    plain = {name: value for name, value in row.items() if name != column} | {"source": "s", "id": 1}
    empty = {column: {"label": True, "weight": 1}.get(column)}
    rows = "".join(json.dumps(one) + "\n" for one in (plain, plain | empty, plain | row))
    dataset = {"format": form, "validation_share": 0, "max_length": 256}
    run = prepared_run(tmp_path / "stops", rows.encode(), **dataset)
    with pytest.raises(UserError, match=rf"rows\.jsonl:3: .*\b{column}\b") as stopped:
        perform(run, "dataset", stage.work)
    assert f"dataset.ignored_columns to [{column}]" in stopped.value.remedy
    assert ("text only" in stopped.value.problem) == (column == "images"), "no format uses it"
    assert ("format chat" in stopped.value.remedy) == (column == "system")
    assert not run.paths.dataset_path.exists()

    run = prepared_run(tmp_path / "ignores", rows.encode(), **dataset, ignored_columns=[column])
    perform(run, "dataset", stage.work)
    report = PreparedDataset.open(run.paths.dataset_path).report()
    assert report["rows_used"] == 3
    assert report["unused_columns"] == sorted({"source", "id", column})
    assert f"columns not used: {', '.join(report['unused_columns'])}" in capsys.readouterr().out


def test_columns_that_a_template_names_are_used(tmp_path: Path) -> None:
    row = json.dumps({"system": "Be brief.", "question": "a", "answer": "b"}).encode()
    templates = {"prompt_template": "{{ system }} {{ question }}", "completion_template": "{{ answer }}"}
    run = prepared_run(tmp_path, row, format="template", **templates)
    perform(run, "dataset", stage.work)
    assert PreparedDataset.open(run.paths.dataset_path).report()["unused_columns"] == []


def test_truncated_rows_are_not_bad(tmp_path: Path) -> None:
    long = json.dumps({"instruction": "a", "context": "", "response": "the quick " * 50}).encode()
    run = prepared_run(tmp_path, dolly(10) + long, overlong="truncate")
    perform(run, "dataset", stage.work)
    report = PreparedDataset.open(run.paths.dataset_path).report()
    assert (report["truncated"], report["bad_rows"], report["rows_used"]) == (1, 0, 11)


def test_no_usable_row(tmp_path: Path) -> None:
    empty = prepared_run(tmp_path / "empty", b"\n\n")
    with pytest.raises(UserError, match="none of the 0 rows can be used"):
        perform(empty, "dataset", stage.work)
    for allowed in (0, 100):
        bad = prepared_run(tmp_path / f"bad-{allowed}", BAD, max_bad_rows=allowed)
        with pytest.raises(UserError, match=r"none of the 6 rows can be used: rows\.jsonl:1 ") as stopped:
            perform(bad, "dataset", stage.work)
        assert "max_bad_rows" not in stopped.value.remedy, "no number would help"
        assert "dataset.format" in stopped.value.remedy
        assert not bad.paths.dataset_path.exists()


def test_a_template_that_escapes_stops_the_stage_in_one_line(tmp_path: Path) -> None:
    run = prepared_run(
        tmp_path,
        dolly(2000),  # several chunks: the error crosses a process border
        format="template",
        completion_template="{{ ''.__class__.__mro__ }}",
        workers=2,
    )
    status, output = finished("dataset", run)
    assert status == 2
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "dataset.completion_template: access to attribute '__class__'" in errors[0]
    assert "Traceback" not in output


def test_a_model_without_a_tokenizer_is_one_line(tmp_path: Path) -> None:
    run = prepared_run(tmp_path, dolly(3))
    for file in run.paths.base_model.glob("*token*"):
        file.unlink()
    with pytest.raises(UserError, match="no usable tokenizer: ") as refused:
        perform(run, "dataset", stage.work)
    assert "\n" not in str(refused.value)


def test_a_full_volume_is_one_line(tmp_path: Path) -> None:
    with small_volume(tmp_path / "small", 4 << 20):
        run = prepared_run(tmp_path / "small", dolly(200), packing="none", max_length=4096)
        status, output = finished("dataset", run)
        assert status == 2, output
        assert "No space left on device" in output
        assert "Traceback" not in output
        assert not list(run.paths.dataset_path.parent.glob("*.partial"))
        assert not run.paths.dataset_path.exists()


def test_ten_examples_are_shown_as_they_are_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = [{"role": "user", "content": "how many"}, {"role": "assistant", "content": "clips"}]
    chats = b"".join(json.dumps({"messages": [*turns, *turns], "n": n}).encode() + b"\n" for n in range(20))
    for form, rows in (("dolly", dolly(20)), ("chat", chats)):
        run = prepared_run(tmp_path / form, rows, format=form, validation_share=0)
        perform(run, "dataset", stage.work)
        found = [example.where for example in shown.read(run.paths.dataset_path)]
        assert len(set(found)) == len(found) == 10
        assert found != sorted(found), "drawn"
    report = PreparedDataset.open(run.paths.dataset_path).report()
    by_reason = {one["reason"]: one for one in report["chats"]["compared_tokens"]}
    assert by_reason["end of turn"] == {"reason": "end of turn", "tokens": 40, "trained": 40}
    # of all 20 examples
    assert sum(one["trained"] for one in by_reason.values()) == report["label_tokens"]
    assert sum(one["tokens"] for one in by_reason.values()) == report["tokens"]
    assert "tokens of these examples: user" in capsys.readouterr().out


def test_only_special_tokens_count_as_ends_of_turns(tmp_path: Path) -> None:
    rows = [{"messages": [CHAT[0], {"role": "assistant", "content": "the quick brown fox " * n}]} for n in (1, 40)]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    run = prepared_run(tmp_path, text, format="chat", max_length=32, overlong="truncate", validation_share=0)
    perform(run, "dataset", stage.work)
    (end,) = PreparedDataset.open(run.paths.dataset_path).report()["chats"]["ends"]
    assert (end["text"], end["turns"]) == ("<|im_end|>", 1), "of a cut answer, the last token is any"


def test_a_row_has_one_example_where_packed_ones_do_not_train_as_they_do_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {}
    for reason in ("", "they see one another"):
        run = prepared_run(tmp_path / (reason or "packed"), dolly(20), validation_share=0)
        finish(run, "certify", facts={"not_packed": reason})
        perform(run, "dataset", stage.work)
        rows[reason] = PreparedDataset.open(run.paths.dataset_path).report()["train_rows"]
        said = capsys.readouterr().out
        assert (
            ("one example a row: they see one another" in said) == ("rows are mostly padding" in said) == bool(reason)
        )
    packed, alone = rows.values()
    assert packed < alone == 20
