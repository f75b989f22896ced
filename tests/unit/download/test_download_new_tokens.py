"""Stage download makes the base model of `model.new_tokens` of the one that it fetched."""

import errno
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from hyperpod_ft.checkpoint import new_tokens
from hyperpod_ft.clean.needs import needs
from hyperpod_ft.cli.output import show_runs
from hyperpod_ft.download import assets, fetch
from hyperpod_ft.download.listing import File
from hyperpod_ft.errors import ConfigError, UserError
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.preflight import check_run, preview
from hyperpod_ft.runs.assets import base_model, model_config
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.shown_rows import Inspection
from hyperpod_ft.stages import download as stage
from hyperpod_ft.stages.stage import perform
from tests.unit.stage_runs import make_run, tree

TOKENS = ["<tool>", "</tool>"]
CONFIG = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 4}
CONFIG |= {"num_attention_heads": 2, "tie_word_embeddings": False}


def tokens_run(tmp_path: Path, tokens: Sequence[str] = TOKENS, **model_settings: Any) -> Run:
    model = tmp_path / "model"
    if not model.exists():
        model.mkdir()
        Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a")).save(str(model / "tokenizer.json"))
        (model / "config.json").write_text(json.dumps(CONFIG))
        rows = np.arange(32, dtype=np.float32).reshape(4, 8)
        save_file({"model.embed_tokens.weight": rows, "lm_head.weight": rows}, model / "model.safetensors")
        (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    given = {"new_tokens": tokens} if tokens else {}
    dataset = {"source": str(tmp_path / "rows.jsonl"), "format": "text"}
    values = {"model": {"source": str(model), **given, **model_settings}}
    method = "lora" if "adapter" in model_settings else "full"
    return make_run(tmp_path, str(model), dataset, more=values | {"training": {"method": method}})


def test_the_fetched_model_stays_and_runs_share_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, without = tokens_run(tmp_path), tokens_run(tmp_path, [])
    assert base_model(run.config) != base_model(without.config) == without.paths.fetched_model
    assert run.paths.fetched_model == without.paths.base_model
    assert run.plan["certify"].fingerprint == without.plan["certify"].fingerprint
    for name in ("download", "train"):
        assert run.plan[name].fingerprint != without.plan[name].fingerprint
    perform(run, "download", stage.work)
    record = run.journal.record("download")
    assert record is not None and record.facts["model.new_tokens"]["finished"] == "2 tokens and 0 rows added"
    assert {Path(output.path).parts[1] for output in record.outputs if output.path.startswith("models")} == {
        run.paths.base_model.name
    }
    before, after = tree(run.paths.fetched_model), tree(run.paths.base_model)
    assert before["model.safetensors"] != after["model.safetensors"] and b"<tool>" in after["tokenizer.json"]
    assert before["config.json"] == after["config.json"] and b"<tool>" not in before["tokenizer.json"]
    capsys.readouterr()
    other = tokens_run(tmp_path, ["<other>"])
    perform(other, "download", stage.work)
    assert f"already there: {run.paths.fetched_model}" in capsys.readouterr().out
    assert {run.paths.relative(path) for path in (run.paths.base_model, run.paths.fetched_model)} <= needs(run)


def test_a_kill_leaves_nothing_that_the_next_attempt_takes_for_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the files of weights have their names."""
    run = tokens_run(tmp_path, ["<tool>", "\n\n", "größer 😀"])

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(new_tokens, "_count_bytes", killed)
        stage.work(run)
    assert not run.paths.base_model.exists()
    perform(run, "download", stage.work)
    assert model_config(Run.open(run.paths.directory).config)["vocab_size"] == 64
    manifest = fetch.Manifest.read(run.paths.base_model)
    assert manifest is not None and manifest.matches(run.paths.base_model)
    assert manifest.finished == "3 tokens and 60 rows added"


def test_what_is_wrong_is_said_before_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, message in ((["<a>", "<a>"], "'<a>' is there twice"), ([""], "at least 1 character")):
        with pytest.raises(ConfigError, match=rf"model.*new_tokens.*{message}"):
            tokens_run(tmp_path, wrong)
    with pytest.raises(ConfigError, match=r"model\.adapter: is not continued with model\.new_tokens; merge it"):
        tokens_run(tmp_path, adapter={"source": "some/adapter"})
    run = tokens_run(tmp_path)
    show_runs.plan(preview(run, Launchers()))
    assert "tokens    2 new: '<tool>', '</tool>'" in capsys.readouterr().out
    assert check_run(run) is not None and model_config(run.config)["vocab_size"] == 4
    with pytest.raises(UserError, match=r"^model\.new_tokens: .*; run: hyperpod-ft submit .* --only download"):
        Inspection.of(run.config, "run.yaml")
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"^model\.new_tokens: .* has no tokenizer\.json"):
        check_run(Run.of(run.config))
    # of a source that is not here, once its files are listed
    with pytest.raises(UserError, match=r"^model\.new_tokens: some/model has no tokenizer\.json"):
        of_hub = tokens_run(tmp_path, source="some/model", revision="0" * 40)
        assets.model(of_hub).choose([File("config.json", 1), File("model.safetensors", 1)])


def test_nothing_is_written_for_a_model_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a volume without the space for the files with the vocabulary, or of a run that cannot train it."""
    run, larger = tokens_run(tmp_path), tokens_run(tmp_path, [f"<{number}>" for number in range(10)])

    def refused(*_: object) -> None:
        raise UserError("cannot be trained", "choose another")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "")

    with monkeypatch.context() as patched, pytest.raises(UserError, match="cannot be trained"):
        patched.setattr(stage, "check_all_nodes", refused)
        stage.work(run)
    written = 2 * 64 * 8 * 4  # the new rows and those before
    with monkeypatch.context() as patched, pytest.raises(UserError, match=r"^model\.source: .* on the volume"):
        patched.setattr(fetch.shutil, "disk_usage", lambda _: SimpleNamespace(free=written - 1))
        patched.setattr(new_tokens, "add_tokens", refused)
        stage.work(larger)
    with monkeypatch.context() as patched, pytest.raises(UserError, match=r"^model\.source: .* on the volume"):
        patched.setattr(new_tokens, "add_tokens", full)
        stage.work(run)
    assert not any(one.paths.base_model.exists() for one in (run, larger))


def test_a_root_behind_a_link_is_the_same_root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tokens_run(tmp_path)
    stage.work(run)
    link = tmp_path / "link"
    link.symlink_to(run.config.root)
    cluster = run.config.cluster.model_copy(update={"root": str(link)})
    capsys.readouterr()
    stage.work(Run.of(run.config.model_copy(update={"cluster": cluster})))
    assert f"model: already there: {link}/models/{run.paths.base_model.name}" in capsys.readouterr().out
