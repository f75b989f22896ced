"""Section dataset with several sources: how they are named, weighed and pinned, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hyperpod_ft.config import run_file, yaml_file, yaml_text
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sections.data import default_name
from hyperpod_ft.errors import ConfigError, UserError
from hyperpod_ft.planning.plan import plan
from tests.pages.blocks import blocks

CHAT = {"source": "org/Chats.v2", "format": "chat"}
ALPACA = {"source": "tatsu-lab/alpaca", "format": "alpaca"}
TEXT = {"source": "s3://bucket/books/", "format": "text"}


def config_of(**dataset: Any) -> RunConfig:
    values = {
        "name": "mix",
        "engine": "torch",
        "cluster": {"instance_type": "local", "root": "/volume"},
        "parallelism": {"ranks_per_node": 1},
        "model": {"source": "org/model"},
        "dataset": dataset,
    }
    return run_file.validate(values, "mix.yaml")


def refused(**dataset: Any) -> str:
    with pytest.raises(ConfigError) as refusal:
        config_of(**dataset)
    return str(refusal.value)


def test_each_source_has_the_shared_settings_and_a_name() -> None:
    config = config_of(
        sources=[CHAT, ALPACA | {"name": "short"}, TEXT], max_length=512, validation_source=ALPACA | {"split": "test"}
    )
    parts = config.dataset.parts
    assert [part.key for part in parts] == [
        *(f"dataset.sources.{number}" for number in range(3)),
        "dataset.validation_source.0",
    ]
    assert [part.name for part in parts] == ["chats-v2", "short", "books", "alpaca-test"]
    assert [part.trains for part in parts] == [True, True, True, False]
    assert {part.dataset.max_length for part in parts} == {512}
    assert [part.dataset.format for part in parts] == ["chat", "alpaca", "text", "alpaca"]
    assert config.dataset.questions.format == "chat", "the chat template writes questions"
    assert yaml_text.read(yaml_text.dump(config), "dump")["dataset"]["sources"][1]["name"] == "short"


def test_one_source_is_a_list_of_one() -> None:
    (part,) = config_of(**ALPACA).dataset.parts
    assert (part.key, part.name, part.dataset.source, part.weight) == ("dataset", "alpaca", "tatsu-lab/alpaca", None)


@pytest.mark.parametrize(
    ("source", "split", "name"),
    [
        ("example:qa", "train", "qa"),
        ("./My Data/rows.jsonl", "train", "rows"),
        ("/data/a.b/", "test", "a-b-test"),
        ("..", "train", "data"),
        ("org/" + "x" * 90, "train", "x" * 64),
    ],
)
def test_default_names(source: str, split: str, name: str) -> None:
    assert default_name(source, split) == name


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ({"sources": [CHAT], **ALPACA}, "dataset: source: cannot be given together with sources"),
        ({"sources": [CHAT], "split": "test"}, "dataset: split: has no effect beside sources"),
        ({}, "dataset.source: is missing; add it"),
        ({"source": "a/b"}, "dataset.format: is missing; add it"),
        ({"sources": [{"source": "a/b"}]}, "dataset.sources.0.format: is missing; add it"),
        ({"sources": [CHAT, {**ALPACA, "formt": 1}]}, "dataset.sources.1.formt: unknown key"),
        ({"sources": [{**ALPACA, "name": "Big one"}]}, "dataset.sources.0.name: must be at most 64 lower-case"),
        ({"sources": [ALPACA, {**ALPACA, "split": "train[:9]"}]}, "alpaca is also the name of dataset.sources.0"),
        ({**ALPACA, "validation_source": ALPACA}, "validation_source.0.name: alpaca is also the name of dataset;"),
        ({"sources": [{**CHAT, "weight": 1}, ALPACA]}, "sources.1.weight: is missing; give every source a weight"),
        ({"sources": [{**CHAT, "weight": 1, "rows": 2}]}, "sources.0: has weight and rows"),
        ({"sources": [{**CHAT, "weight": 0}]}, "dataset.sources.0.weight: "),
        ({**ALPACA, "validation_source": {**CHAT, "rows": 3}}, "dataset.validation_source.0.rows: unknown key"),
        (
            {"sources": [ALPACA, {"source": "org/pairs", "format": "preference"}]},
            "format preference cannot be mixed with alpaca",
        ),
        ({"sources": [ALPACA, TEXT], "max_target_length": 64}, "format text: an encoder-decoder is trained on pairs"),
        ({"sources": [{**TEXT, "format": "template"}]}, "dataset.sources.0: format template needs"),
    ],
)
def test_what_is_refused(dataset: dict[str, Any], expected: str) -> None:
    assert expected in refused(**dataset)


def test_every_source_is_pinned(tmp_path: Path) -> None:
    for name in ("one", "two", "held"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "a"}\n')
    given = [{"source": f"./{name}.jsonl", "format": "text"} for name in ("one", "two", "held")]
    config = run_file.resolve(config_of(sources=given[:2], validation_source=given[2]), tmp_path)
    assert [part.dataset.source for part in config.dataset.parts] == [
        str(tmp_path / f"{name}.jsonl") for name in ("one", "two", "held")
    ]
    assert all(str(part.dataset.revision).startswith("local-") for part in config.dataset.parts)
    assert run_file.resolve(config, Path("/")) == config, "resolving it again changes nothing"
    (tmp_path / "two.jsonl").write_text('{"text": "b"}\n')
    with pytest.raises(Exception, match=r"dataset\.sources\.1\.revision: .* is local-"):
        run_file.resolve(config, tmp_path)


def test_a_key_of_one_source_can_be_overridden() -> None:
    """So a sweep can try weights."""
    values: dict[str, Any] = {"dataset": {"sources": [{"weight": 1}, {"weight": 1}]}}
    yaml_file.override(run_file.RUN_FILE, values, "dataset.sources.1.weight=3")
    yaml_file.override(run_file.RUN_FILE, values, "dataset.sources.0.name=first")
    assert values["dataset"]["sources"] == [{"weight": 1, "name": "first"}, {"weight": 3}]
    for place in ("2.weight", "-1.weight", "first.weight", "2"):
        with pytest.raises(UserError, match=r"is no number of an item, from 0; there are 2"):
            yaml_file.override(run_file.RUN_FILE, values, f"dataset.sources.{place}=3")


# of a run with one source
ALONE = {"download": "91555b9001c90d61", "dataset": "3b9731a84ce9672f"}


def test_a_run_with_one_source_has_the_fingerprints_it_had() -> None:
    found = plan(config_of(**ALPACA, revision="v1", split="train[:10%]", validation_share=0.1))
    assert {name: found[name].fingerprint for name in ALONE} == ALONE


def test_what_changes_fingerprints_of_several() -> None:
    def prints(*sources: dict[str, Any], **more: Any) -> tuple[str, str]:
        found = plan(config_of(sources=list(sources), **more))
        return found["download"].fingerprint, found["dataset"].fingerprint

    download, dataset = prints(CHAT, ALPACA)
    weighed = prints(CHAT | {"weight": 1}, ALPACA | {"weight": 3})
    assert weighed[0] == download and weighed[1] != dataset, "weights fetch no other files"
    assert prints(CHAT, ALPACA | {"split": "train[:5]"})[0] == download
    assert prints(CHAT, ALPACA | {"split": "test"})[0] != download
    assert prints(CHAT, ALPACA, deduplicate=True)[1] != dataset
    assert prints(CHAT, ALPACA, validation_source=TEXT)[0] != download
    assert prints(CHAT)[0] != plan(config_of(**CHAT))["download"].fingerprint


def test_the_example_on_the_page_is_valid(tmp_path: Path) -> None:
    _, several, _ = map(yaml.safe_load, blocks("docs/your-own-data.md", "yaml"))
    for name in ("help", "exam"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    config = run_file.resolve(config_of(**several["dataset"]), tmp_path)
    assert [part.name for part in config.dataset.parts] == ["ultrachat_200k-train_sft", "help", "exam"]
