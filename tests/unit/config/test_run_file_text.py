"""The text of a run file and its overrides: YAML within limits, and one line about what is no YAML."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hyperpod_ft.cluster import config as cluster_config
from hyperpod_ft.config import run_file, yaml_text
from hyperpod_ft.errors import UserError
from tests.conftest import run_file_values
from tests.unit.config.run_files import load, refused, write


@pytest.mark.parametrize(
    ("override", "expected"),
    [("training.learning_rate=1e-4", 1e-4), ("training.epochs=2", 2.0), ("training.learning_rate=3.0E-05", 3e-5)],
)
def test_overrides_are_yaml(tmp_path: Path, override: str, expected: float) -> None:
    config = load(tmp_path, override)
    assert getattr(config.training, override.split("=", maxsplit=1)[0].split(".")[1]) == expected


def test_override_of_a_list(tmp_path: Path) -> None:
    assert load(tmp_path, "lora.target_modules=[q_proj, v_proj]").lora.target_modules == ("q_proj", "v_proj")


@pytest.mark.parametrize("override", ["x", "=1", "training..epochs=1", "name.x=1"])
def test_malformed_override_is_refused(tmp_path: Path, override: str) -> None:
    assert "--set" in refused(tmp_path, override)


def test_time_limits_stay_text(tmp_path: Path) -> None:
    text = yaml.safe_dump(run_file_values(tmp_path)).replace("cluster:\n", "cluster:\n  time_limit: 24:00:00\n")
    assert run_file.load(write(tmp_path, text)).cluster.time_limit == "24:00:00"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\na: 2\n", "run.yaml:2: key 'a'"),
        ("a: [1\n", "run.yaml"),
        ("- 1\n", "no keys"),
        ("", "no keys"),
        ("1: 2\n", "run.yaml:1: key 1"),
        ("a: !!python/object/apply:os.system ['touch pwned']\n", "run.yaml"),
        ("a: !!bool maybe\n", "run.yaml"),
        ("a: !!timestamp foo\n", "run.yaml"),
        ("a: !!binary aGVsbG8=\n", "run.yaml"),
        ("a: !!set {x: null}\n", "run.yaml"),
    ],
)
def test_bad_yaml_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        run_file.load(write(tmp_path, text))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{chr(ord(name) - 1)}'] * 9)}]\n" for name in "bcdefgh"
)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (BOMB, ("10,000", "aliases")),
        ("seed:\n" + BOMB.replace("\n", "\n  ").replace("a:", "  a:", 1), ("10,000", "aliases")),
        (f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 20)}]\n", ("1,000,000 characters", "aliases")),
        ("a: &a [*a]\n", ("alias",)),
        ("# " + "x" * 2_000_000, ("1,000,000 characters",)),
        ("a: " + "[" * 5000 + "]" * 5000 + "\n", ("20 levels",)),
        ("".join(f"a{n}: &a{n} [{f'*a{n - 1}' if n else ''}]\n" for n in range(30)), ("run.yaml:20: ", "20 levels")),
        ("a: [" + "1, " * 20_000 + "]\n", ("10,000",)),
        ("{" + ", ".join(f"k{n}: 1" for n in range(200)) + "}", ("unknown key", "more problems")),
        ('name: "\\uD83D"\n', ("run.yaml:1: ", "half of a surrogate pair")),
        ('{"\\uDE00": 1}\n', ("run.yaml:1: ", "half of a surrogate pair")),
        ("seed: " + "1" * 100 + "\n", ("seed", "2147483647")),
        ("seed: " + "1" * 100_000 + "\n", ("run.yaml:1: ", "100,000 digits")),
        ("seed: " + "x" * 100_000 + "\n", ("seed: must be a number (given: 'xxx", "...")),
        ("seed: [" + f"'{'x' * 100}', " * 2000 + "]\n", ("seed: must be a number (given: ['xxx", "...")),
        ("engine: " + "x" * 100_000 + "\n", ("engine", "'torch', 'neuron' or 'trl'", "...")),
        ("? " + "k" * 100_000 + "\n: 1\n", ("kkk...: unknown key", "known: name, engine")),
        ("? [" + "k, " * 2000 + "]\n: 1\n", ("is not a string",)),
        ("a: !<" + "t" * 100_000 + "> 1\n", ("run.yaml:1: ttt",)),
        ("a: *" + "t" * 100_000 + "\n", ("run.yaml:1: ", "alias")),
        (f"cluster: {{environment: {{? {'9' * 100_000}- : a}}}}\n", ("cluster.environment: ", "999...")),
        (f"cluster: {{instance_type: {'9' * 100_000}a}}\n", ("cluster.instance_type: ", "999...", "p5.48xlarge")),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
@pytest.mark.parametrize("load_file", [run_file.load, cluster_config.load], ids=["run", "cluster"])
def test_huge_input_gives_short_lines(
    tmp_path: Path, text: str, facts: tuple[str, ...], load_file: Callable[[Path], Any]
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as error:
        load_file(path)
    lines = str(error.value).splitlines()
    assert all(str(path) in line and len(line.replace(str(path), "").encode()) <= 300 for line in lines), lines
    assert len(lines) <= 21
    if load_file is run_file.load:
        assert all(fact in str(error.value) for fact in facts), lines


def test_huge_overrides_give_short_lines(tmp_path: Path) -> None:
    for override in (
        "x" * 100_000,
        "seed=" + "x" * 100_000,
        "seed.x" + "y" * 100_000 + "=1",
        "x" * 100_000 + "=1",
        "seed=[" + "[" * 5000,
        "seed=" + "1" * 2_000_000,
    ):
        assert len(refused(tmp_path, override).replace(str(tmp_path), "")) <= 300


def test_a_source_too_long_for_the_file_system_is_refused(tmp_path: Path) -> None:
    for source in ("./" + "x" * 5000, "x" * 5000 + "/y", "/" + "x/" * 5000, "example:" + "x" * 5000):
        message = refused(tmp_path, dataset__source=source, dataset__revision=None)
        assert "dataset.source" in message
        assert len(message) <= 300


def test_a_run_file_within_the_limits_can_be_opened_again(tmp_path: Path) -> None:
    """Resolving adds every default: what is then written has more values than the user's file had."""
    prompts = ["x"] * 9_900
    config = load(tmp_path, generate__prompts=prompts)
    path = tmp_path / "frozen.yaml"
    path.write_text(yaml_text.dump(config), encoding="utf-8")
    assert run_file.open_frozen(path) == config


def test_a_frozen_file_of_another_user_may_be_anything(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"frozen\.yaml"):
        yaml_text.read("[" * 100_000, "frozen.yaml", limited=False)


def test_aliases_work(tmp_path: Path) -> None:
    text = yaml.safe_dump(run_file_values(tmp_path, generate__prompts=["x"]))
    path = write(tmp_path, text.replace("- x", "- &p question\n  - *p\n  - {instruction: *p}"))
    assert run_file.load(path).generate.prompts == ("question", "question", {"instruction": "question"})


def test_json_escapes_of_an_emoji_are_one_character(tmp_path: Path) -> None:
    config = run_file.load(write(tmp_path, json.dumps(run_file_values(tmp_path, generate__prompts=["\U0001f600"]))))
    assert config.generate.prompts == ("\U0001f600",)
    assert run_file.validate(yaml_text.read(yaml_text.dump(config), ""), "") == config


def test_yaml_that_is_not_utf8_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"name: \xff\n")
    with pytest.raises(UserError, match="run"):
        run_file.load(path)
