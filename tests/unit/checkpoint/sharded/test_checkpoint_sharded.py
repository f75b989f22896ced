"""torch.distributed.checkpoints that open as adapters or models, whoever wrote them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor

from hyperpod_ft import digests
from hyperpod_ft.checkpoint.sharded.sharded import open_checkpoint
from hyperpod_ft.errors import UserError
from tests.unit.tensor_values import gather

LORA = {"r": 2, "alpha": 4, "dropout": 0.1, "target_modules": ["q_proj"], "rslora": True, "dora": False}
FACTORS = {
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.randn(2, 4),
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight": torch.randn(6, 2),
}
WEIGHTS = {"model.norm.weight": torch.randn(4), "lm_head.weight": torch.randn(5, 4).bfloat16()}


DESCRIBED = {
    "format": 4,
    "engine": "torch",
    "step": 4,
    "fingerprint": "0123",
    "base_model": {"source": "org/model", "revision": "0123abc"},
    "degrees": {"world_size": 1, "data_parallel": 1, "pipeline_parallel": 1, "tensor_parallel": 1},
    "progress": {},
}


def save(directory: Path, state: Mapping[str, Any], method: str | None = None, lora: object = None) -> Path:
    torch_dcp.save(dict(state), storage_writer=torch_dcp.FileSystemWriter(directory), no_dist=True)
    if method:
        index = directory / ".metadata"
        files = {"files": {index.name: index.stat().st_size}, "sha256": {index.name: digests.file_sha256(index)}}
        description = DESCRIBED | {"method": method, "lora": lora} | files
        (directory / "checkpoint.json").write_text(json.dumps(description))
    return directory


def assert_holds(found: Any, expected: Mapping[str, Tensor]) -> None:
    tensors = {tensor.name: gather(tensor) for tensor in found}
    assert sorted(tensors) == sorted(expected)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def own_names(factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Engine torch's names, from those of a live PEFT model."""
    return {name.removeprefix("base_model.model."): tensor for name, tensor in saved_names(factors).items()}


def saved_names(factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace(".default", ""): tensor for name, tensor in factors.items()}


def test_an_adapter_of_engine_torch(tmp_path: Path) -> None:
    state = {
        "model": own_names(FACTORS),
        "optimizer": {"x.exp_avg": torch.zeros(2)},
        "random": {"0.cpu": torch.zeros(3)},
    }
    found = open_checkpoint(save(tmp_path, state, method="lora", lora=LORA))
    (adapter,) = found.adapters
    assert (found.model, found.files, adapter.name) == ((), None, "default")
    assert adapter.config["base_model_name_or_path"] == "org/model" and adapter.config["use_rslora"] is True
    assert (adapter.config["r"], adapter.config["lora_alpha"], adapter.config["target_modules"]) == (2, 4, ["q_proj"])
    assert_holds(adapter.tensors, saved_names(FACTORS))
    assert adapter.config["use_dora"] is False
    save(tmp_path, state, method="lora", lora=LORA | {"dora": True})
    assert open_checkpoint(tmp_path).adapters[0].config["use_dora"] is True


def test_a_model_of_engine_torch(tmp_path: Path) -> None:
    found = open_checkpoint(save(tmp_path, {"model": WEIGHTS, "optimizer": {"x": torch.zeros(2)}}, method="full"))
    assert (found.adapters, found.files) == ((), None)
    assert_holds(found.model, WEIGHTS)


@pytest.mark.parametrize("nested", [True, False])
def test_a_model_that_others_saved(tmp_path: Path, nested: bool) -> None:
    others = {"optimizer": {"step": torch.zeros(1)}}
    found = open_checkpoint(save(tmp_path, {"model": WEIGHTS, **others} if nested else {**WEIGHTS, **others}))
    assert_holds(found.model, WEIGHTS)
    assert found.files is None
    (tmp_path / "config.json").write_text("{}")
    assert open_checkpoint(tmp_path).files == tmp_path


def test_an_adapter_that_others_saved_with_its_base(tmp_path: Path) -> None:
    base = {"base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight": torch.randn(6, 4)}
    save(tmp_path, {"model": {**FACTORS, **base}})
    with pytest.raises(UserError, match=r"adapter_config\.json: is missing"):
        open_checkpoint(tmp_path)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (adapter,) = open_checkpoint(tmp_path).adapters
    assert adapter.config == config
    assert_holds(adapter.tensors, saved_names(FACTORS))


def test_a_factor_of_another_adapter_is_refused(tmp_path: Path) -> None:
    other = {name.replace("default", "other"): tensor for name, tensor in FACTORS.items()}
    save(tmp_path, {"model": {**FACTORS, **other}})
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 3}')
    with pytest.raises(UserError, match=r"lora_A\.other\.weight does not belong to the adapter `default`"):
        open_checkpoint(tmp_path)


def test_a_weight_among_the_factors_is_refused(tmp_path: Path) -> None:
    state = {"model": {**own_names(FACTORS), "model.norm.weight": torch.zeros(2)}}
    with pytest.raises(UserError, match=r"model\.norm\.weight is not one of a LoRA adapter"):
        open_checkpoint(save(tmp_path, state, method="lora", lora=LORA))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda text: "[]", ""),
        (lambda text: text[:-1], ""),
        (lambda text: "{}", "format"),
        (lambda text: text.replace('"format": 4', '"format": 9'), "format"),
        (lambda text: text.replace('"method"', '"how"'), "method"),
        (lambda text: text.replace('"rslora"', '"other"'), r"lora\.rslora"),
        (lambda text: text.replace('"dora"', '"other"'), r"lora\.dora"),
        (lambda text: text.replace('"lora": {', '"lora": null, "other": {'), "lora"),
        (lambda text: text.replace('"sha256": {".metadata"', '"sha256": {"other"'), "sha256"),
    ],
)
def test_a_damaged_description_is_refused(tmp_path: Path, change: Callable[[str], str], key: str) -> None:
    file = save(tmp_path, {"model": own_names(FACTORS)}, method="lora", lora=LORA) / "checkpoint.json"
    open_checkpoint(tmp_path)
    file.write_text(change(file.read_text()))
    with pytest.raises(UserError, match=rf"checkpoint\.json: .*{key}.*; use an earlier checkpoint"):
        open_checkpoint(tmp_path)
