"""Genuine sharded checkpoints of the Trainium stack become models that answer as the live ones did, by the commands."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hyperpod_ft.cli.main import app
from hyperpod_ft.errors import UserError
from tests.unit import genuine_checkpoints
from tests.unit.rounding import bounds

pytestmark = genuine_checkpoints.needed
DIVERGED = "lora_tp2_sp_DIVERGED_xser"
LOGITS = "live_sharded_logits.safetensors"


def run(*arguments: object) -> dict[str, object]:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads(result.stdout)
    return found


def base_of(name: str) -> Path:
    return genuine_checkpoints.directory("base") / ("llama-kv8" if "kv8" in name else "llama-kv4")


def equal(left: Path, right: Path) -> bool:
    ours, theirs = load_file(left), load_file(right)
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[key], theirs[key]) and ours[key].dtype == theirs[key].dtype for key in theirs
    )


@pytest.mark.parametrize("name", [name for name in genuine_checkpoints.NAMES if name != DIVERGED])
def test_the_model_is_what_was_trained(tmp_path: Path, name: str) -> None:
    fixture, base, model = genuine_checkpoints.directory(name), base_of(name), tmp_path / "model"
    if name.startswith("full"):
        run("consolidate", fixture / "checkpoint-4", "-o", model)
        assert equal(model / "model.safetensors", fixture / "expected_consolidated" / "model.safetensors")
    else:
        adapter = tmp_path / "adapter"
        run("consolidate", fixture / "checkpoint-4", "-o", adapter, "--base", base)
        weights = "adapter_model.safetensors"
        assert equal(adapter / weights, fixture / "expected_consolidated" / weights)
        run("merge", "--base", base, "--adapter", adapter, "-o", model)
        # what PEFT merged on another machine
        expected, merged = (load_file(path / "model.safetensors") for path in (fixture / "expected_merged", model))
        live = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
        computed = bounds(live, torch.float32)
        assert merged.keys() == expected.keys() and computed
        assert all(bound.same(merged[name], expected[name]) for name, bound in computed.items())
        assert all(torch.equal(merged[name], expected[name]) for name in expected.keys() - computed.keys())
        verified = run("verify", model, "--adapter", adapter, "--base", base)
        assert verified["findings"] == [] and verified["checksums"] == "match"
    if (fixture / LOGITS).exists():
        answers = load_file(fixture / LOGITS)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        with torch.inference_mode():
            logits = loaded(answers["input_ids"]).logits
        torch.testing.assert_close(logits, answers["trained"].float(), rtol=0, atol=1e-5)
        if "base" in answers:
            assert (logits - answers["base"]).abs().max() > 1e-3


def test_copies_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    checkpoint = genuine_checkpoints.directory(DIVERGED) / "checkpoint-4"
    with pytest.raises(UserError, match=r"differ between ranks, most base_model\.model\S+: largest difference 0\.0385"):
        run("consolidate", checkpoint, "-o", tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_tensor_file_is_refused(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-4"
    shutil.copytree(genuine_checkpoints.directory("lora_tp8_kv4_xser") / "checkpoint-4", checkpoint)
    next(checkpoint.rglob("*tp_rank_05*/tensor_7.pt")).unlink()
    with pytest.raises(UserError, match=r"tp_rank_05\S+tensor_7\.pt: is missing"):
        run("consolidate", checkpoint, "-o", tmp_path / "adapter")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]
