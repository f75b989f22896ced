"""Merge: an adapter goes into the model that it was trained on, once; files say so themselves, wherever they are."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hyperpod_ft.checkpoint.verify.verify import verify
from hyperpod_ft.cli.main import app
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.runs.run import Run
from hyperpod_ft.serving import models
from hyperpod_ft.stages import consolidate, merge
from tests.unit import tiny_checkpoints
from tests.unit.checkpoint.merge.tiny_merge import make
from tests.unit.tiny_checkpoints import add_checkpoint, run_on


@pytest.fixture
def trained(tmp_path: Path) -> Run:
    """A run that has been consolidated and merged."""
    base = tiny_checkpoints.base_model(tmp_path / "published")
    run = run_on(tmp_path, base)
    add_checkpoint(run, tiny_checkpoints.trainable(tiny_checkpoints.peft_model(base)), step=2)
    consolidate.work(run)
    assert merge.work(run).facts["unchecked"] == 0
    return run


def merged(base: Path, *adapters: Path, output: Path) -> tuple[int, str]:
    """Exit code and output of `merge`."""
    given = [part for adapter in adapters for part in ("--adapter", str(adapter))]
    done = CliRunner().invoke(app, ["merge", "--base", str(base), *given, "-o", str(output)])
    return (2, str(done.exception)) if isinstance(done.exception, UserError) else (done.exit_code, done.output)


def in_files_of_its_own(model: Path, target: Path) -> Path:
    """The same model under other names, in other files, without what the kit noted in them."""
    shutil.copytree(model, target)
    tensors = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    parts = {f"model-{number}.safetensors": name for number, name in enumerate(tensors)}
    for file, name in parts.items():
        save_file({name: tensors[name]}, target / file)
    index = {"metadata": {}, "weight_map": {name: file for file, name in parts.items()}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    return target


def test_an_adapter_is_not_added_twice(trained: Run, tmp_path: Path) -> None:
    for name in ("adapter", "merged"):
        shutil.copytree(trained.paths.directory / name, tmp_path / "elsewhere" / name)
    adapter, model = tmp_path / "elsewhere" / "adapter", tmp_path / "elsewhere" / "merged"
    status, said = merged(model, adapter, output=tmp_path / "twice")
    assert status == 2 and f"{model}: the adapter {adapter} was merged into it already" in said
    assert not (tmp_path / "twice").exists()
    # no library keeps the note when it saves the model again
    status, said = merged(in_files_of_its_own(model, tmp_path / "again"), adapter, output=tmp_path / "twice")
    assert status == 2 and f"is not the model that the adapter {adapter} was trained on" in said
    for look in (
        lambda: models.find(str(model), Launchers(), [f"mine={adapter}"]),
        lambda: verify(model, adapter=adapter, base=model),
    ):
        with pytest.raises(UserError, match="merged into it already"):
            look()


def test_the_base_may_have_other_files(trained: Run, tmp_path: Path) -> None:
    base = in_files_of_its_own(trained.paths.base_model, tmp_path / "base")
    assert merged(base, trained.paths.adapter, output=tmp_path / "out")[0] == 0
    again, first = (
        load_file(tmp_path / "out" / "model.safetensors"),
        load_file(trained.paths.tuned_model / "model.safetensors"),
    )
    assert again.keys() == first.keys() and all(torch.equal(again[name], first[name]) for name in first)


def test_a_foreign_adapter_is_merged_once_and_the_model_remembers_it(trained: Run, tmp_path: Path) -> None:
    make(tmp_path)
    status, said = merged(tmp_path / "base", tmp_path / "adapter", output=tmp_path / "once")
    assert status == 0 and said.count("not checked: ") == 1
    status, said = merged(tmp_path / "once", tmp_path / "adapter", output=tmp_path / "twice")
    assert status == 2 and "merged into it already" in said
    # and through a second merge, of another adapter
    (tmp_path / "other").mkdir()
    other = make(tmp_path / "other")
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "lora_B" in name:
                parameter.add_(1)
    other.save_pretrained(tmp_path / "other" / "adapter")
    assert merged(tmp_path / "once", tmp_path / "other" / "adapter", output=tmp_path / "both")[0] == 0
    status, said = merged(tmp_path / "both", tmp_path / "adapter", output=tmp_path / "twice")
    assert status == 2 and "merged into it already" in said
