"""Local sources: linked, checked, shared."""

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from hyperpod_ft.download import assets, fetch, sources
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.preflight import check_run
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import download as stage
from hyperpod_ft.stages.stage import perform
from tests.unit.stage_runs import make_run, start, tree, weights

ROWS = b'{"instruction": "a", "context": "", "response": "b"}\n'
CONFIG = b'{"model_type": "llama"}'
WEIGHTS = weights(norm=b"1234")


def local_run(tmp_path: Path, changed: Mapping[str, bytes] = {}) -> Run:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "optimizer.pt", "pytorch_model.bin"):
        (model / name).write_text(name)
    for name, content in {"config.json": CONFIG, "model.safetensors": WEIGHTS, **changed}.items():
        (model / name).write_bytes(content)
    (tmp_path / "rows.txt.jsonl").write_bytes(ROWS)
    return make_run(tmp_path, str(model), {"source": str(tmp_path / "rows.txt.jsonl"), "format": "dolly"})


def test_large_files_are_hard_links_and_small_ones_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources.sources, "SMALL_FILE_BYTES", len(CONFIG))
    run = local_run(tmp_path)
    perform(run, "download", stage.work)
    assert tree(run.paths.base_model).keys() == {
        ".hyperpod-ft.json",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert (run.paths.base_model / "model.safetensors").samefile(tmp_path / "model" / "model.safetensors")
    assert not (run.paths.base_model / "config.json").samefile(tmp_path / "model" / "config.json")
    assert (run.paths.raw_datasets[0] / "rows.txt.jsonl").read_bytes() == ROWS


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM])
def test_copies_where_links_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(sources.os, "link", refuse)
    monkeypatch.setattr(sources.sources, "SMALL_FILE_BYTES", 0)
    run = local_run(tmp_path)
    perform(run, "download", stage.work)
    assert (run.paths.base_model / "model.safetensors").read_bytes() == WEIGHTS
    assert not (run.paths.base_model / "model.safetensors").samefile(tmp_path / "model" / "model.safetensors")


@pytest.mark.parametrize(("method", "times"), [("mxfp4", 4), ("fp8", 2), (None, 0)])
def test_what_decoding_takes_must_be_free_before_the_weights_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str | None, times: int
) -> None:
    """Beside the quantized weights, which are links here and take nothing."""
    described = {"model_type": "llama"} | ({"quantization_config": {"quant_method": method}} if method else {})
    run = local_run(tmp_path, {"config.json": json.dumps(described).encode()})
    needed = times * assets.model(run).listing().size
    free = SimpleNamespace(free=needed - 1)
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: free)
    if method:
        with pytest.raises(UserError, match=r"^model\.source: .* GB more are needed, .* free on the volume"):
            perform(run, "download", stage.work)
        assert not list((tmp_path / "root" / "models").rglob("*.safetensors"))
    free.free = needed
    perform(run, "download", stage.work)
    assert (run.paths.base_model / "model.safetensors").exists()


def test_files_of_other_splits_are_not_fetched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = local_run(tmp_path).config.model.source
    for name in ("train-00000-of-00001", "test-00000-of-00001", "validation"):
        (tmp_path / "data" / f"{name}.jsonl").parent.mkdir(exist_ok=True)
        (tmp_path / "data" / f"{name}.jsonl").write_bytes(ROWS)

    def run(**dataset: str) -> Run:
        return make_run(tmp_path, model, {"source": str(tmp_path / "data"), "format": "dolly"} | dataset)

    default, tests, some = run(), run(split="test"), run(split="train[:10%]")
    for one in (default, tests, some):
        perform(one, "download", stage.work)
    assert tree(default.paths.raw_datasets[0]).keys() == {".hyperpod-ft.json", "train-00000-of-00001.jsonl"}
    assert tree(tests.paths.raw_datasets[0]).keys() == {".hyperpod-ft.json", "test-00000-of-00001.jsonl"}
    assert "not of it: test-00000-of-00001.jsonl, validation.jsonl" in capsys.readouterr().out
    assert some.paths.raw_datasets[0] == default.paths.raw_datasets[0], "a slice fetches the same files"
    assert len({one.plan.run_id for one in (default, tests, some)}) == 3
    with pytest.raises(UserError, match=r"dataset\.split: .* test, train, validation"):
        check_run(run(split="dev"))


def test_each_source_has_a_directory_and_those_of_the_same_files_share_one(tmp_path: Path) -> None:
    model, here = local_run(tmp_path).config.model.source, str(tmp_path / "rows.txt.jsonl")
    (tmp_path / "more.jsonl").write_bytes(ROWS * 2)
    dataset = {
        "sources": [
            {"source": here, "format": "dolly", "split": "train[:50%]"},
            {"source": here, "format": "dolly", "split": "train[50%:]", "name": "rest"},
        ],
        "validation_source": {"source": str(tmp_path / "more.jsonl"), "format": "dolly"},
    }
    run = make_run(tmp_path, model, dataset)
    perform(run, "download", stage.work)
    first, rest, more = run.paths.raw_datasets
    assert first == rest != more
    assert (first / "rows.txt.jsonl").read_bytes() == ROWS and (more / "more.jsonl").read_bytes() == ROWS * 2
    record = run.journal.record("download")
    assert record is not None
    assert [*record.facts] == ["model", "dataset.sources.0", "dataset.sources.1", "dataset.validation_source.0"]
    outputs = [output.path for output in record.outputs]
    assert len(outputs) == len(set(outputs)) and sum(path.startswith("datasets/raw/") for path in outputs) == 4
    (tmp_path / "more.jsonl").write_bytes(ROWS)
    changed = make_run(tmp_path, model, dataset)
    (tmp_path / "more.jsonl").write_bytes(b"")
    with pytest.raises(UserError, match=r"dataset\.validation_source\.0\.source: \S+ changed since the run was"):
        perform(changed, "download", stage.work)


def test_links_in_the_source_become_files(tmp_path: Path) -> None:
    run = local_run(tmp_path)
    model = tmp_path / "model"
    (tmp_path / "blob").write_bytes(WEIGHTS)
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(tmp_path / "blob")
    perform(run, "download", stage.work)
    assert not (run.paths.base_model / "model.safetensors").is_symlink()
    assert (run.paths.base_model / "model.safetensors").read_bytes() == WEIGHTS


def test_a_source_that_changed_since_planning_is_refused(tmp_path: Path) -> None:
    run = local_run(tmp_path)
    (tmp_path / "model" / "config.json").write_text("other")
    with pytest.raises(UserError, match=r"model\.source: \S+/model changed since the run was submitted; submit"):
        perform(run, "download", stage.work)


def test_a_source_that_is_gone_does_not_matter_once_fetched(tmp_path: Path) -> None:
    run = local_run(tmp_path)
    perform(run, "download", stage.work)
    run.paths.record_path("download").unlink()
    (tmp_path / "rows.txt.jsonl").unlink()
    perform(run, "download", stage.work)
    assert run.journal.is_done("download")


def test_no_weights_in_safetensors(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_bytes(ROWS)
    run = make_run(tmp_path, "./model", {"source": "./rows.jsonl", "format": "dolly"})
    with pytest.raises(UserError, match=r"has no safetensors weights \(model\.safetensors\); choose a model"):
        perform(run, "download", stage.work)
    assert not run.paths.base_model.exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"[]", "config.json: is not a JSON object"),
        ("config.json", b'{"model_', "config.json: is damaged"),
        ("model.safetensors", WEIGHTS[:-1], "model.safetensors: is truncated"),
        (
            "model.safetensors",
            b"PK\x03\x04\x00\x00\x08\x08" + bytes(100),
            "model.safetensors: is not a safetensors",
        ),
        ("model.safetensors.index.json", b'{"weight_map": {"norm": "model-2.safetensors"}}', "-2.safetensors: is miss"),
    ],
)
def test_a_damaged_model_is_refused_before_it_is_published(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    run = local_run(tmp_path, {name: content})
    with pytest.raises(UserError, match=rf"model\.source: the model is damaged: \S+{message}"):
        perform(run, "download", stage.work)
    assert not run.paths.base_model.exists()


def test_neither_torch_nor_transformers_nor_the_hub_is_imported(tmp_path: Path) -> None:
    for name in ("torch", "transformers", "numpy", "huggingface_hub"):
        (tmp_path / "poison" / name).mkdir(parents=True)
        (tmp_path / "poison" / name / "__init__.py").write_text(f"raise RuntimeError('{name} was imported')")
    process = start("download", local_run(tmp_path), PYTHONPATH=str(tmp_path / "poison"))
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
