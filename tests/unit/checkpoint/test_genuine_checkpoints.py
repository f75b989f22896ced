"""Genuine sharded checkpoints of the Trainium stack become models that answer as the live ones did, by the commands."""

import json
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
from tests.unit.genuine_checkpoints import Genuine
from tests.unit.rounding import bounds


def run(*arguments: object) -> dict[str, object]:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads(result.stdout)
    return found


def equal(left: Path, right: Path) -> bool:
    ours, theirs = load_file(left), load_file(right)
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[key], theirs[key]) and ours[key].dtype == theirs[key].dtype for key in theirs
    )


@pytest.mark.parametrize("genuine", genuine_checkpoints.SOUND, ids=str)
def test_the_model_is_what_was_trained(tmp_path: Path, genuine: Genuine) -> None:
    model = tmp_path / "model"
    if genuine.lora:
        adapter = tmp_path / "adapter"
        run("consolidate", genuine.checkpoint, "-o", adapter, "--base", genuine.base)
        assert equal(adapter / genuine.weights.name, genuine.weights)
        run("merge", "--base", genuine.base, "--adapter", adapter, "-o", model)
        base = AutoModelForCausalLM.from_pretrained(genuine.base, dtype=torch.float32)
        peft = PeftModel.from_pretrained(base, genuine.consolidated)
        computed = bounds(peft, torch.float32)
        expected, merged = peft.merge_and_unload().state_dict(), load_file(model / "model.safetensors")
        assert merged.keys() == expected.keys() and computed
        assert all(bound.same(merged[name], expected[name]) for name, bound in computed.items())
        assert all(torch.equal(merged[name], expected[name]) for name in expected.keys() - computed.keys())
        verified = run("verify", model, "--logits", "--adapter", adapter, "--base", genuine.base)
        assert verified["findings"] == [] and verified["checksums"] == "match"
    else:
        run("consolidate", genuine.checkpoint, "-o", model)
        assert equal(model / genuine.weights.name, genuine.weights)
    if genuine.logits.exists():
        live = load_file(genuine.logits)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        with torch.inference_mode():
            logits = loaded(live["input_ids"]).logits
        torch.testing.assert_close(logits, live["trained"].float(), rtol=0, atol=1e-5)
        if "base" in live:
            assert (logits - live["base"]).abs().max() > 1e-3


@pytest.mark.parametrize("genuine", genuine_checkpoints.DIVERGED, ids=str)
def test_copies_that_differ_between_ranks_are_refused(tmp_path: Path, genuine: Genuine) -> None:
    wanted = r"every rank but differ; the largest difference is 0\.0\S+, in base_model\.model"
    with pytest.raises(UserError, match=wanted) as error:
        run("consolidate", genuine.checkpoint, "-o", tmp_path / "adapter")
    assert "lora_" in str(error.value)
    assert list(tmp_path.iterdir()) == []
