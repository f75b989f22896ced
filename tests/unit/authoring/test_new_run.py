"""Run files that `init` writes for a model, a dataset and an instance type."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.authoring.new_run import NewRun, new_run
from hyperpod_ft.config import run_file
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.preflight import preview
from hyperpod_ft.runs.run import Run
from scripts.memory_table import LLAMA_3_8B

ROWS: dict[str, dict[str, Any]] = {
    "dolly": {"instruction": "Name a bird.", "context": "", "response": "A tit.", "category": "qa"},
    "alpaca": {"instruction": "Name a bird.", "input": "", "output": "A tit."},
    "prompt-completion": {"prompt": "Name a bird.", "completion": "A tit."},
    "chat": {"messages": [{"role": "user", "content": "Name a bird."}, {"role": "assistant", "content": "A tit."}]},
    "text": {"text": "A tit is a bird."},
    "template": {"question": "Name a bird.", "answer": "A tit."},
    "preference": {"prompt": "Name a bird.", "chosen": "A tit.", "rejected": "A bat."},
    "unpaired-preference": {"prompt": "Name a bird.", "completion": "A tit.", "label": True},
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA_3_8B))
    return str(tmp_path / "llama")


def rows(tmp_path: Path, *written: dict[str, Any]) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in written))
    return str(path)


def written(wanted: NewRun, output: Path) -> tuple[RunConfig, str]:
    text = new_run(wanted, output).text()
    output.write_text(text)
    return run_file.load(output), text


@pytest.mark.parametrize("name", ROWS)
def test_the_format_is_recognized_and_the_file_can_be_planned(tmp_path: Path, name: str) -> None:
    data = rows(tmp_path, ROWS[name], ROWS[name])
    config, text = written(NewRun("example:tiny-llama", data, "local"), tmp_path / "run.yaml")
    assert config.dataset.format == name
    assert "source: ./rows.jsonl" in text, "relative to the run file"
    objectives = {"preference": "dpo", "unpaired-preference": "kto"}
    assert config.training.objective == objectives.get(name, "sft")
    if name not in ("text", "preference"):
        assert "Name a bird." in str(config.generate.prompts) and "A tit" not in str(config.generate.prompts)
    assert preview(Run.of(config), Launchers()).stages


@pytest.mark.parametrize(
    ("instance", "nodes", "method"),
    [
        ("p5.48xlarge", 1, "lora"),
        ("p4d.24xlarge", 1, "full"),
        ("g5.xlarge", 1, "lora"),
        ("g5.12xlarge", 2, "lora"),
        ("trn1.32xlarge", 1, "lora"),
        ("ml.trn2.48xlarge", 1, "full"),
    ],
)
def test_it_fits_the_instance(tmp_path: Path, model: str, instance: str, nodes: int, method: str) -> None:
    data = rows(tmp_path, ROWS["dolly"])
    config, text = written(NewRun(model, data, instance, nodes, method), tmp_path / "run.yaml")
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"root": str(tmp_path / "root")})})
    known = preview(Run.of(config), Launchers())
    assert known.fit is not None and known.fit.memory is not None
    assert known.fit.memory.total <= known.available_bytes
    assert f"{known.fit.memory.total / 2**30:.1f} of" in text, "as the comment says"
    assert f"= {known.rows_per_step} rows per step" in text
    assert 16 <= known.rows_per_step <= 64


@pytest.mark.parametrize(
    ("instance", "written_there"), [("trn1.32xlarge", 2), ("trn2.48xlarge", 2), ("p5.48xlarge", 0)]
)
def test_trainium_gets_the_repositories_of_its_packages(
    tmp_path: Path, model: str, instance: str, written_there: int
) -> None:
    config, _ = written(NewRun(model, rows(tmp_path, ROWS["dolly"]), instance), tmp_path / "run.yaml")
    repositories = config.env.package_repositories
    assert len(repositories) == written_there
    assert not repositories or "https://pip.repos.neuron.amazonaws.com" in repositories


def test_what_does_not_fit_anywhere_is_refused_with_what_would(tmp_path: Path, model: str) -> None:
    with pytest.raises(UserError, match="GiB") as error:
        new_run(NewRun(model, rows(tmp_path, ROWS["dolly"]), "g5.xlarge", 1, "full"), tmp_path / "run.yaml")
    assert error.value.remedy


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([{"a": 1}], "no format has the fields a"),
        ([ROWS["dolly"], ROWS["text"]], "rows.jsonl:2"),
        ([ROWS["dolly"], {"instruction": "Name a bird."}], r"rows.jsonl:2: has other fields than the first.*--format"),
        ([], "has no rows"),
    ],
)
def test_rows_of_no_format(tmp_path: Path, given: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(UserError, match=said):
        new_run(NewRun("example:tiny-llama", rows(tmp_path, *given), "local"), tmp_path / "run.yaml")


def test_the_split_that_is_taken_is_said(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, form in (("test", "text"), ("train", "alpaca"), ("validation", "dolly")):
        (tmp_path / "data" / f"{name}-00000-of-00001.jsonl").write_text(json.dumps(ROWS[form]) + "\n")
    wanted = NewRun("example:tiny-llama", str(tmp_path / "data"), "local")
    config, text = written(wanted, tmp_path / "run.yaml")
    assert (config.dataset.split, config.dataset.format) == ("train", "alpaca")
    assert "not of it: test-00000-of-00001.jsonl, validation-00" in next(
        line for line in text.splitlines() if line.strip().startswith("split:")
    )
    config, _ = written(replace(wanted, split="validation[:1]"), tmp_path / "other.yaml")
    assert (config.dataset.split, config.dataset.format) == ("validation[:1]", "dolly")
    with pytest.raises(UserError, match="test, train, validation"):
        new_run(replace(wanted, split="dev"), tmp_path / "third.yaml")


def test_columns_that_are_not_used_are_said(tmp_path: Path) -> None:
    row, output = ROWS["chat"] | {"id": 7, "source": "s"}, tmp_path / "run.yaml"
    wanted = NewRun("example:tiny-llama", rows(tmp_path, row), "local")
    assert "Columns not used: id, source." in new_run(wanted, tmp_path / "run.yaml").head
    rows(tmp_path, ROWS["chat"], row | {"images": ["x.png"]})
    head = " ".join(new_run(wanted, tmp_path / "run.yaml").head)
    assert "rows.jsonl:2" in head and "dataset.ignored_columns" in head and "images" in head
    for name in ("chat", "alpaca"):
        head = " ".join(new_run(replace(wanted, dataset=rows(tmp_path, ROWS["dolly"]), format=name), output).head)
        missing = "messages" if name == "chat" else "output"
        assert "rows.jsonl:1" in head and f"missing field '{missing}'" in head and "will stop" in head


def test_a_dataset_of_the_hub_is_known_by_name_or_needs_a_format(tmp_path: Path) -> None:
    def wanted(dataset: str, name: str | None = None) -> NewRun:
        return NewRun("example:tiny-llama", dataset, "local", format=name)

    for name in (None, "dolly"):
        config, text = written(wanted("databricks/databricks-dolly-15k", name), tmp_path / f"{name}.yaml")
        assert config.dataset.format == "dolly" and "not looked at" in text
        assert config.dataset.overlong == "truncate", "its long examples do not stop the run"
    config, _ = written(wanted("tatsu-lab/alpaca"), tmp_path / "alpaca.yaml")
    assert config.dataset.overlong == "drop"
    with pytest.raises(UserError, match="--format"):
        new_run(wanted("org/unknown"), tmp_path / "x.yaml")
    assert new_run(wanted("org/unknown", "chat"), tmp_path / "x.yaml").get("dataset.format") == "chat"


def test_a_model_that_cannot_be_looked_at_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    wanted = NewRun("org/model", rows(tmp_path, ROWS["dolly"]), "p5.48xlarge")
    config, text = written(wanted, tmp_path / "run.yaml")
    assert "# The model was not looked at" in text
    assert config.training.activation_checkpointing == "full"


@pytest.mark.parametrize("method", ["lora", "full"])
def test_layers_that_could_not_be_looked_at_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Of a family whose linear layers the kit does not know, where torch is missing."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "starcoder2", "architectures": ["X"]}))
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(name='torch')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    wanted = NewRun(str(tmp_path / "model"), rows(tmp_path, ROWS["dolly"]), "p5.48xlarge", method=method)
    _, text = written(wanted, tmp_path / "run.yaml")
    assert ("# Whether LoRA needs lora.target_modules" in text) == (method == "lora")


@pytest.mark.parametrize(("count", "share"), [(60, 0.2), (400, 0.05), (2000, 0.02)])
def test_enough_rows_are_held_out_of_a_small_dataset(tmp_path: Path, count: int, share: float) -> None:
    data = rows(tmp_path, *[ROWS["text"]] * count)
    for form in (None, "text"):
        config, _ = written(NewRun("example:tiny-llama", data, "local", format=form), tmp_path / "run.yaml")
        assert config.dataset.validation_share == share


def test_a_slice_is_one_of_all_rows(tmp_path: Path) -> None:
    data = rows(tmp_path, *[ROWS["text"]] * 4000)
    wanted = NewRun("example:tiny-llama", data, "local", format="text", split="train[:50%]")
    config, _ = written(wanted, tmp_path / "run.yaml")
    assert config.dataset.validation_share == 0.02
