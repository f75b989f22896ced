"""Datasets of other tools' files as section dataset."""

import json
from pathlib import Path

import pytest

from hyperpod_ft.authoring.conversion.convert import Supplement, convert
from hyperpod_ft.authoring.conversion.foreign_file import Conversion
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from tests.unit.authoring.converting import AXOLOTL, LLAMA_FACTORY, TRL, converted


def test_dataset_info_is_found_above_the_file_or_where_the_tool_was_started(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = LLAMA_FACTORY.replace("dataset_dir: .\n", "").replace("./llama", str(directory / "llama"))
    (directory / "data").mkdir()
    for name in ("dataset_info.json", "birds.jsonl"):
        (directory / name).rename(directory / "data" / name)
    examples = directory / "examples" / "lora"
    examples.mkdir(parents=True)
    _, config = converted(examples, text)
    assert config.dataset.source == str(directory / "data" / "birds.jsonl")
    elsewhere = directory.parent / f"{directory.name}-elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(directory)
    _, config = converted(elsewhere, text)
    assert config.dataset.source == str(directory / "data" / "birds.jsonl")


def test_several_datasets_are_sources(directory: Path) -> None:
    described = {
        "birds": {"file_name": "birds.jsonl"},
        "more": {"file_name": "birds.json"},
        "hub": {"hf_hub_url": "org/rows"},
        "seen": {"file_name": "seen.json", "formatting": "openai", "columns": {"messages": "messages", "images": "i"}},
        "heard": {"file_name": "heard.json", "formatting": "openai", "columns": {"audios": "audios"}},
        "human": {"file_name": "human.json", "formatting": "sharegpt", "columns": {"tools": "tools"}},
        "renamed": {"file_name": "human.json", "formatting": "sharegpt", "tags": {"user_tag": "person"}},
        "pairs": {"file_name": "pairs.jsonl", "ranking": True, "columns": {"chosen": "chosen", "rejected": "rejected"}},
    }
    (directory / "dataset_info.json").write_text(json.dumps(described))
    (directory / "birds.json").write_text((directory / "birds.jsonl").read_text())

    def with_datasets(names: str, more: str = "") -> tuple[Conversion, RunConfig]:
        return converted(directory, LLAMA_FACTORY.replace("dataset: birds", f"dataset: {names}") + more)

    found, config = with_datasets("birds, more, hub", "max_samples: 10\nmix_strategy: concat\n")
    assert [part.dataset.source for part in config.dataset.parts] == [
        str(directory / "birds.jsonl"),
        str(directory / "birds.json"),
        "org/rows",
    ]
    assert [part.name for part in config.dataset.parts] == ["birds", "birds-2", "rows"]
    assert {part.dataset.split for part in config.dataset.parts} == {"train[:10]"}
    assert {part.dataset.format for part in config.dataset.parts} == {"alpaca"}
    assert not {"max_samples", "mix_strategy"} & found.changes.keys()
    found, _ = with_datasets("birds, more", "mix_strategy: interleave_under\ninterleave_probs: 0.3,0.7\n")
    assert {"mix_strategy", "interleave_probs"} <= found.changes.keys()
    for names, said in (
        ("seen", "images in a column images"),
        ("heard", "heard has audios"),
        ("renamed", "messages of role and content"),
        ("missing", "does not describe it"),
    ):
        with pytest.raises(UserError, match=said):
            with_datasets(names)
    talk = [{"from": "human", "value": "Name a bird."}, {"from": "gpt", "value": "A tit."}]
    (directory / "human.json").write_text(json.dumps([{"conversations": talk, "tools": "[]"}]))
    _, config = with_datasets("human")
    assert config.dataset.format == "chat"
    with pytest.raises(UserError, match="prompt, chosen and rejected"):
        converted(directory, LLAMA_FACTORY.replace("stage: sft", "stage: dpo").replace("birds", "pairs"))
    other = AXOLOTL.replace("adapter:", "  - path: ./more.jsonl\n    type: alpaca\nadapter:")
    (directory / "more.jsonl").write_text((directory / "birds.jsonl").read_text())
    _, config = converted(directory, other)
    assert [part.name for part in config.dataset.parts] == ["birds", "more"]
    with pytest.raises(UserError, match="type completion beside others"):
        converted(directory, other.replace("more.jsonl\n    type: alpaca", "more.jsonl\n    type: completion"))
    (directory / "other.yaml").write_text(other)
    given = Supplement("p5.48xlarge", dataset=str(directory / "birds.jsonl"))
    found = convert(directory / "other.yaml", given, directory / "run.yaml")
    assert found.draft.get("dataset.source") == "./birds.jsonl"


def test_rows_with_other_fields_than_the_kit_reads_are_refused(directory: Path) -> None:
    fields = "field_messages: conversations\n    message_property_mappings: {role: from, content: value}"
    _, config = converted(directory, AXOLOTL.replace("type: alpaca", f"type: chat_template\n    {fields}"))
    assert config.dataset.format == "chat"
    for kind, field in (("chat_template", "field_messages: talk"), ("chat_template.default", "")):
        text = AXOLOTL.replace("type: alpaca", f"type: {kind}\n    {field}") + ("" if field else "rl: dpo\n")
        with pytest.raises(UserError, match=r"datasets\[0\]\.field_messages: rows of format"):
            converted(directory, text)
    with pytest.raises(UserError, match="--format"):
        converted(directory, AXOLOTL.replace("type: alpaca", "type: oasst"))


def test_columns_that_the_named_format_lacks_are_said(directory: Path) -> None:
    row = {"instruction": "Name a bird.", "context": "", "response": "A tit."}
    (directory / "birds.jsonl").write_text(json.dumps(row) + "\n")
    head = " ".join(converted(directory, AXOLOTL)[0].draft.head)
    assert "birds.jsonl:1" in head and "missing field 'output'" in head and "will stop" in head


@pytest.mark.parametrize(
    ("tool", "old", "new", "split"),
    [
        (AXOLOTL, "split: train", "split: train[:90%]", "train[:90%]"),
        (AXOLOTL, "split: train", "split: train+test", "train"),
        (LLAMA_FACTORY, "packing:", "max_samples: 1000\npacking:", "train[:1000]"),
        (TRL, "./pairs.jsonl", "org/pairs\ndataset_train_split: train_prefs", "train_prefs"),
    ],
)
def test_the_split_is_kept_or_named(directory: Path, tool: str, old: str, new: str, split: str) -> None:
    found, config = converted(directory, tool.replace(old, new))
    assert config.dataset.split == split
    assert ("datasets[0].split" in found.changes) == ("+" in new)
