"""Models loaded for generation: whole, or one line that says why not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hyperpod_ft.checkpoint.formats.pretrained import load
from hyperpod_ft.errors import UserError
from tests.unit import tiny_checkpoints


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_checkpoints.base_model(tmp_path / "model@1")


def change_config(model: Path, **values: Any) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    loaded = load(tiny_checkpoints.base_model(tmp_path / "tied", tied=True), "auto", "sdpa")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_a_missing_tensor_is_named(model: Path) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=r"1 of the model's tensors are missing: model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        load(model, torch.float32, "sdpa")


@pytest.mark.parametrize("values", [{"hidden_size": 64}, {"num_hidden_layers": None}, {"num_attention_heads": 0}])
def test_a_config_that_does_not_fit_the_weights_is_one_line(model: Path, values: dict[str, Any]) -> None:
    change_config(model, **values)
    with pytest.raises(UserError, match="cannot load the model: ") as refused:
        load(model, torch.float32, "sdpa")
    assert "\n" not in str(refused.value)


def test_damaged_weights_are_one_line(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(UserError, match="cannot load the model: SafetensorError"):
        load(model, torch.float32, "sdpa")


def test_a_pickle_is_not_loaded(model: Path) -> None:
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no file named model\.safetensors"):
        load(model, torch.float32, "sdpa")


def test_the_models_own_code_is_not_run(model: Path) -> None:
    (model / "evil.py").write_text("raise SystemExit('the model ran')")
    change_config(
        model, model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    )
    with pytest.raises(UserError, match="trust_remote_code"):
        load(model, torch.float32, "sdpa")
