"""The run file: recipes, sources, and what one setting may be."""

import sys
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.config import run_file, yaml_text
from hyperpod_ft.errors import ConfigError, UserError
from tests.conftest import run_file_values
from tests.unit.config.run_files import load, refused, write


@pytest.mark.parametrize("name", run_file.recipes())
def test_recipes_are_valid(name: str) -> None:
    assert run_file.load(run_file.find(name)).name in name


def test_resolving_twice_changes_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n")
    once = load(tmp_path, dataset__source="./data.jsonl", dataset__revision=None)
    assert once.dataset.source == str(data)
    assert once.env.python == sys.executable
    assert run_file.resolve(once, Path("/elsewhere")) == once


def test_frozen_run_file_round_trips(tmp_path: Path) -> None:
    odd = [
        "1e5",
        "612e890",
        "010",
        "yes",
        "null",
        "~",
        "24:00:00",
        "",
        "=",
        "<<",
        "- x",
        "a: b",
        "#",
        "1_000",
        ".5",
        "0x1",
    ]
    values = run_file_values(
        tmp_path,
        name="1e5",
        model__revision="612e890",
        cluster__account="12e3",
        dataset__files=odd,
        cluster__environment={f"A{number}": value for number, value in enumerate(odd)},
        generate__prompts=[
            *filter(str.strip, odd),
            {"instruction": "1e5", "number": 1e5, "flag": True, "nothing": None},
        ],
    )
    config = run_file.resolve(run_file.validate(values, "run.yaml"), tmp_path)
    assert run_file.load(write(tmp_path, yaml_text.dump(config))) == config


def test_local_data_is_pinned_by_content(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("1\n")
    first = load(tmp_path, dataset__source="./data.jsonl", dataset__revision=None).dataset.revision
    data.write_text("2\n")
    second = load(tmp_path, dataset__source="./data.jsonl", dataset__revision=None).dataset.revision
    data.write_text("1\n")
    third = load(tmp_path, dataset__source="./data.jsonl", dataset__revision=None).dataset.revision
    assert first == third != second
    assert "restore the files" in refused(tmp_path, dataset__source="./data.jsonl", dataset__revision=second)


def test_unknown_key_names_the_close_one(tmp_path: Path) -> None:
    assert "training.learning_rat: unknown key; did you mean learning_rate?" in refused(
        tmp_path, training__learning_rat=1
    )
    assert "clutser: unknown key; did you mean cluster?" in refused(tmp_path, clutser={})


def test_fp16_is_refused_with_what_to_write_instead(tmp_path: Path) -> None:
    for given in ("fp16", "float16"):
        said = refused(tmp_path, training__precision=given)
        assert "training.precision: the kit does not compute in fp16; set bf16" in said


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, training__epochs=-1, dataset__max_length=True, engine="jax")
    assert len(str(error.value).splitlines()) == 3


def test_missing_key_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "name: x\nengine: torch\nmodel: {source: a/b}\ndataset: {source: a/b}\n")
    with pytest.raises(ConfigError, match=r"dataset\.format: is missing"):
        run_file.load(path)


@pytest.mark.parametrize(
    "root", ["/fsx/a$(touch pwned)", "/fsx/a\nb", "/fsx/'a", '/fsx/"a', "/fsx/a;b", "/fsx/`a`", "/fsx/%j", "/fsx/a\\b"]
)
def test_paths_that_a_shell_or_slurm_could_read_are_refused(tmp_path: Path, root: str) -> None:
    assert "cluster.root" in refused(tmp_path, cluster__root=root)


@pytest.mark.parametrize("root", ["/fsx/two words", "/fsx/größe/データ", "/fsx/a@b=c,d+e:f~g"])
def test_other_paths_work(tmp_path: Path, root: str) -> None:
    assert load(tmp_path, cluster__root=root).cluster.root == root


@pytest.mark.parametrize("value", ["dev\n#SBATCH --uid=0", "dev; id", "$(id)", "-dev", ""])
def test_slurm_words_are_strict(tmp_path: Path, value: str) -> None:
    assert "cluster.partition" in refused(tmp_path, cluster__partition=value)
    assert "cluster.account" in refused(tmp_path, cluster__account=value)


@pytest.mark.parametrize("name", ["a b", "../x", "$(id)", "", "ü", "-a", "a/b", "x" * 65, "a\n"])
def test_names_are_strict(tmp_path: Path, name: str) -> None:
    assert "name" in refused(tmp_path, name=name)


@pytest.mark.parametrize("source", ["a/b/c", "a b", "$(touch pwned)", "org/mod\nel", "a..b/c", "s3://", "s3://B/x"])
def test_sources_are_strict(tmp_path: Path, source: str) -> None:
    assert "model.source" in refused(tmp_path, model__source=source, model__revision=None)


def test_missing_local_source_is_named(tmp_path: Path) -> None:
    assert "no such file or directory" in refused(tmp_path, model__source="./nothing", model__revision=None)


def test_unknown_example_lists_the_known(tmp_path: Path) -> None:
    assert "known: feedback, pictures, preferences, qa, requests, tiny-llama, tiny-qwen3-vl, tiny-teacher" in refused(
        tmp_path, model__source="example:llama", model__revision=None
    )


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"])
def test_secrets_are_refused(tmp_path: Path, name: str) -> None:
    message = refused(tmp_path, cluster__environment={name: "hunter2"})
    assert "looks like a secret" in message
    assert "hunter2" not in message


@pytest.mark.parametrize(
    "content",
    ["http://user:hunter2@proxy:3128", "hf_abcdefghijklmnop", "AKIAABCDEFGHIJKLMNOP", "--key sk-abcdefghijklmnop"],
)
def test_secrets_under_other_names_are_refused(tmp_path: Path, content: str) -> None:
    message = refused(tmp_path, cluster__environment={"X": content})
    assert "looks like a secret" in message
    assert content not in message


@pytest.mark.parametrize("name", ["RUN_DIR", "PYTHONPATH", "python", "SLURM_JOB_ID", "MASTER_PORT", "BASH_ENV", "PATH"])
def test_names_that_the_scripts_set_are_refused(tmp_path: Path, name: str) -> None:
    assert "is set by the job scripts" in refused(tmp_path, cluster__environment={name: "x"})


@pytest.mark.parametrize(
    ("key", "value"),
    [("seed", 2**63), ("training__epochs", 1e308), ("cluster__nodes", 10**23), ("dataset__max_length", 10**9)],
)
def test_numbers_that_would_overflow_later_are_refused(tmp_path: Path, key: str, value: float) -> None:
    assert key.replace("__", ".") in refused(tmp_path, **{key: value})


@pytest.mark.parametrize("values", [{"A B": "1"}, {"A": "x\ny"}, {"1A": "x"}, {"A\n": "x"}])
def test_environment_names_and_values_are_plain(tmp_path: Path, values: dict[str, str]) -> None:
    assert "cluster.environment" in refused(tmp_path, cluster__environment=values)


def test_find_suggests_a_recipe() -> None:
    with pytest.raises(UserError, match="no such run file"):
        run_file.find("x" * 5000)
    with pytest.raises(UserError, match="did you mean quickstart"):
        run_file.find("quickstrat")


@pytest.mark.parametrize("given", ["https://user:s3cretpw@host/simple", ["https://user:s3cretpw@host/simple"]])
def test_no_refusal_shows_a_password(tmp_path: Path, given: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        run_file.validate(run_file_values(tmp_path, env__package_repositories=given), "run.yaml")
    assert "s3cretpw" not in str(refused.value)
    assert "package_repositories" in str(refused.value)
