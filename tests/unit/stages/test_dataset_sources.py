"""Stage dataset with several sources: shares, repeats, validation of each, duplicates, and what is reported."""

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyperpod_ft.config.sections.results import Generate
from hyperpod_ft.data.packing import PackedRows
from hyperpod_ft.data.prepared import PreparedDataset
from hyperpod_ft.data.seq2seq.packing import Seq2SeqRows
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import dataset as stage
from hyperpod_ft.stages import train
from hyperpod_ft.stages.stage import perform
from tests.unit import tiny_t5
from tests.unit.stage_runs import tree
from tests.unit.stages.dataset_runs import TOKENIZER, Rows, dolly, mixed_run, prepared_run

Sources = dict[str, tuple[str, Rows, dict[str, Any]]]


def chats(count: int, said: str = "chat") -> Rows:
    for number in range(count):
        question, answer = f"how many {number}", f"{said} {number}"
        yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def alpacas(count: int, said: str = "alpaca") -> Rows:
    return ({"instruction": f"the fox {number}", "input": "", "output": f"{said} {number}"} for number in range(count))


def documents(count: int, said: str = "text") -> Rows:
    return ({"text": f"{said} quick brown fox {number}"} for number in range(count))


def three(**weights: float) -> Sources:
    keys = {name: {"weight": weight} for name, weight in weights.items()}
    return {
        "chat": ("chat", chats(20), keys.get("chat", {})),
        "short": ("alpaca", alpacas(60), keys.get("short", {})),
        "books": ("text", documents(40), keys.get("books", {})),
    }


def learned(split: PackedRows | None) -> Counter[str]:
    """How often each answer, or text, is trained, whatever its row."""
    assert split is not None
    found: Counter[str] = Counter()
    for ids, labels, positions in zip(split.input_ids, split.labels, split.position_ids, strict=True):
        starts = np.flatnonzero(positions == 0)
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            text = TOKENIZER.decode([token for token in labels[start:end] if token != -100], skip_special_tokens=True)
            if text.strip():
                found[text.strip()] += 1
    return found


def of(answers: Counter[str], said: str) -> Counter[str]:
    return Counter({answer: times for answer, times in answers.items() if answer.startswith(said)})


def prepared(run: Run) -> PreparedDataset:
    perform(run, "dataset", stage.work)
    return PreparedDataset.open(run.paths.dataset_path)


def by_name(found: PreparedDataset) -> dict[str, dict[str, Any]]:
    return {source["name"]: source for source in found.report()["sources"]}


def test_three_formats_with_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = mixed_run(tmp_path, three(chat=2, short=1, books=1), validation_share=0.1)
    found = prepared(run)
    train, validation = learned(found.split("train")), learned(found.split("validation"))
    # 18 + 54 + 36 examples are left for training: 108, of which a half, a quarter and a quarter
    assert {said: of(train, said).total() for said in ("chat", "alpaca", "text")} == {
        "chat": 54,
        "alpaca": 27,
        "text": 27,
    }
    assert set(of(train, "chat").values()) == {3}, "each three times: 54 of 18"
    assert set(of(train, "alpaca").values()) == {1} and len(of(train, "alpaca")) == 27, "half of them left out"
    assert {said: of(validation, said).total() for said in ("chat", "alpaca", "text")} == {
        "chat": 2,
        "alpaca": 6,
        "text": 4,
    }
    assert not train.keys() & validation.keys()
    report = found.report()
    assert (report["train_examples"], report["validation_examples"]) == (108, 12)
    sources = by_name(found)
    assert [sources[name]["repeated"] for name in ("chat", "short", "books")] == [36, 0, 0]
    assert [sources[name]["left_out"] for name in ("chat", "short", "books")] == [0, 27, 9]
    assert sum(source["train_tokens"] for source in sources.values()) < report["tokens"]
    printed = capsys.readouterr().out
    assert "chat: 54 training examples, 50.0% of an epoch, 36 of them repeats; 2 validation" in printed
    assert "short: 27 training examples, 25.0% of an epoch; 27 of 54 are left out; 6 validation" in printed
    assert "chat: tokenized 20 rows" in printed
    record = run.journal.record("dataset")
    assert record is not None and record.facts == report | {"packing": "bfd"}


def test_validation_rows_have_one_source_each(tmp_path: Path) -> None:
    found = prepared(mixed_run(tmp_path, three(), validation_share=0.25))
    split = found.split("validation")
    assert isinstance(split, PackedRows)
    rows = [source["validation_rows"] for source in found.report()["sources"]]
    assert min(rows) > 0 and sum(rows) == len(split)
    names = {"chat": "chat", "short": "alpaca", "books": "text"}
    assert [*found.validation_sources()] == [*names]
    for name, own in found.validation_sources().items():
        said = names[name]
        part = PackedRows(split.input_ids[own], split.labels[own], split.position_ids[own])
        assert learned(part) and not learned(part) - of(learned(part), said)


def test_samples_name_their_source(tmp_path: Path) -> None:
    found = prepared(mixed_run(tmp_path, three(chat=5, short=1, books=1), validation_share=0.1))
    samples = found.samples("train")
    assert {sample.source for sample in samples} == {"chat", "short", "books"}
    assert all(sample.templated == (sample.source == "chat") for sample in samples)
    answers = [sample.completion for sample in samples]
    assert len(answers) == len(set(answers)), "repeats are sampled once"


def test_a_list_of_one_has_the_rows_of_the_source_alone(tmp_path: Path) -> None:
    listed = mixed_run(tmp_path / "listed", {"rows": ("alpaca", list(alpacas(50)), {})}, validation_share=0.2)
    alone = prepared_run(
        tmp_path / "alone", tmp_path / "listed" / "rows.jsonl", format="alpaca", max_length=256, validation_share=0.2
    )
    trees = [tree(prepared(run).directory) for run in (listed, alone)]
    arrays = [{name: data for name, data in one.items() if name.endswith(".npy")} for one in trees]
    assert arrays[0] == arrays[1]


def test_the_same_bytes_with_any_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyperpod_ft.data.reading.CHUNK_BYTES", 1000)
    trees = []
    for workers in (1, 3):
        run = mixed_run(tmp_path / str(workers), three(), validation_share=0.1, workers=workers, deduplicate=True)
        trees.append(tree(prepared(run).directory))
    assert trees[0] == trees[1]


def test_validation_sources_are_not_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = three() | {"held": ("alpaca", list(alpacas(7, "held")), {"validates": True})}
    found = prepared(mixed_run(tmp_path, sources, validation_share=0))
    assert not of(learned(found.split("train")), "held")
    assert "  held: no training examples; 7 validation\n" in capsys.readouterr().out
    assert learned(found.split("validation")) == Counter({f"held {number}": 1 for number in range(7)})
    assert by_name(found)["held"] | {"train_tokens": 0} == {
        "name": "held",
        "rows_read": 7,
        "rows_used": 7,
        "bad_rows": 0,
        "duplicates": 0,
        "examples": 0,
        "train_examples": 0,
        "train_tokens": 0,
        "validation_examples": 7,
        "validation_rows": by_name(found)["held"]["validation_rows"],
        "repeated": 0,
        "left_out": 0,
    }


def overlapping() -> Sources:
    """Ten rows that both sources have, five within the second, and three of validation that the first has."""
    one, two = list(alpacas(30)), list(alpacas(40))[20:]
    held = [*list(alpacas(30))[:3], *alpacas(2, "held")]
    return {
        "one": ("alpaca", one, {}),
        "two": ("alpaca", two + two[-5:], {}),
        "held": ("alpaca", held, {"validates": True}),
    }


def test_duplicates_are_kept_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = prepared(mixed_run(tmp_path, overlapping(), validation_share=0, deduplicate=True))
    train, validation = learned(found.split("train")), learned(found.split("validation"))
    assert set(train.values()) == {1} and len(train) == 37, "40 different ones without the 3 of validation"
    assert validation.total() == 5 and not train.keys() & validation.keys()
    assert {name: source["duplicates"] for name, source in by_name(found).items()} == {"one": 3, "two": 15, "held": 0}
    printed = capsys.readouterr().out
    assert "15 duplicates removed" in printed and "warning" not in printed


def test_validation_examples_in_training_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = prepared(mixed_run(tmp_path, overlapping(), validation_share=0))
    assert found.report()["validation_in_training"] == 3
    assert "warning: 3 of 5 validation examples are in the training data too" in capsys.readouterr().out


def test_one_source_is_warned_about_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = prepared(prepared_run(tmp_path, dolly(20) * 2, validation_share=0.5))
    assert "validation examples are in the training data too" in capsys.readouterr().out
    assert not {"sources", "validation_in_training"} & found.report().keys(), "the report has the bytes it had"


def test_an_encoder_decoder_has_several_sources_too(tmp_path: Path) -> None:
    pairs = {name: [{"prompt": f"say {name}", "completion": name} for _ in range(20)] for name in ("red", "blue")}
    sources: Sources = {name: ("prompt-completion", rows, {}) for name, rows in pairs.items()}
    run = mixed_run(tmp_path, sources, max_length=16, max_target_length=16, validation_share=0.5)
    shutil.rmtree(run.paths.base_model)
    tiny_t5.save(run.paths.base_model, ["say red blue"])
    found = prepared(run)
    split = found.split("validation")
    assert isinstance(split, Seq2SeqRows)
    rows = found.validation_sources()
    assert sum(map(len, rows.values())) == len(split)
    tokens = {name: {frozenset(row) - {-100} for row in split.labels[own].tolist()} for name, own in rows.items()}
    assert len(tokens["red"]) == len(tokens["blue"]) == 1 and tokens["red"] != tokens["blue"]


def test_rows_of_a_source(tmp_path: Path) -> None:
    sources = three()
    sources["chat"] = (*sources["chat"][:2], {"rows": 50})
    found = prepared(mixed_run(tmp_path, sources, validation_share=0))
    train = learned(found.split("train"))
    assert [of(train, said).total() for said in ("chat", "alpaca", "text")] == [50, 60, 40]
    assert sorted(of(train, "chat").values()) == [2] * 10 + [3] * 10


@pytest.mark.parametrize(
    ("sources", "keys", "problem"),
    [
        ({"bad": ("alpaca", list(documents(3)), {})}, {}, "none of the 3 rows can be used: bad/bad.jsonl:1"),
        ({"seen": ("chat", [{"messages": [], "images": "x"}], {})}, {}, "dataset.sources.1 (seen): seen.jsonl:1:"),
        ({"copy": ("chat", list(chats(9)), {"rows": 4})}, {"deduplicate": True}, "sources.1: no example is left"),
    ],
)
def test_errors_name_the_source(tmp_path: Path, sources: Sources, keys: dict[str, Any], problem: str) -> None:
    run = mixed_run(tmp_path, {"fine": ("chat", list(chats(9)), {}), **sources}, validation_share=0, **keys)
    with pytest.raises(UserError) as error:
        stage.work(run)
    assert problem in str(error.value) and "\n" not in str(error.value)
    assert not run.paths.dataset_path.exists()


def test_a_prompt_that_the_template_refuses_is_known_before_the_training(tmp_path: Path) -> None:
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "how many"}]
    more = {"generate": {"prompts": ["how many", {"messages": said}]}}
    run = mixed_run(tmp_path, {"chat": ("chat", chats(9), {})}, more, validation_share=0)
    template = run.paths.base_model / "chat_template.jinja"
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    template.write_text(refusing + template.read_text())
    with pytest.raises(UserError, match=r"generate\.prompts\.1: .*no system role"):
        stage.work(run)
    assert not run.paths.dataset_path.exists()
    others = replace(run, config=run.config.model_copy(update={"generate": Generate()}))
    perform(others, "dataset", stage.work)
    train.check_prompts(others)
    with pytest.raises(UserError, match=r"generate\.prompts\.1: .*no system role"):
        train.check_prompts(run)
