"""Adapters of experts' parameters, as PEFT 0.21 and 0.18 arrange them, merged into the tensors that files have."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hyperpod_ft.checkpoint.merge.merge import WeightedAdapter, merge
from hyperpod_ft.errors import UserError
from tests.unit.checkpoint.merge.peft_models import DTYPES, base_in, lora, save_base, trained, weights
from tests.unit.rounding import bounds
from tests.unit.tiny_families import MIXTURES, SIZES

TARGETS = ["experts.gate_up_proj", "experts.down_proj"]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model.model.layers.0.mlp.experts."
GATE_UP = PREFIX + "base_layer.lora_{}.weight"
DOWN = PREFIX + "lora_{}.weight"


def mixture(model_type: str) -> Callable[[], PreTrainedModel]:
    config = AutoConfig.for_model(model_type, **SIZES | MIXTURES[model_type] | {"initializer_range": 0.1})
    return lambda: AutoModelForCausalLM.from_config(config)


def adapted(root: Path, model_type: str, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    save_base(root / "base", mixture(model_type), dtype)
    config = lora(**{"target_parameters": TARGETS, "target_modules": ["q_proj"]} | options)
    trained(base_in(root / "base", dtype), config).save_pretrained(root / "adapter")


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    """Its gate_up_proj is square."""
    adapted(tmp_path, "qwen3_moe")
    return tmp_path


def merged(root: Path, name: str = "adapter") -> dict[str, torch.Tensor]:
    merge(root / "base", [WeightedAdapter(root / name)], root / f"merged-{name}")
    return weights(root / f"merged-{name}")


def edit(root: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None], name: str = "edited") -> None:
    """Write a changed copy of the adapter."""
    tensors = load_file(root / "adapter" / WEIGHTS)
    config = json.loads((root / "adapter" / CONFIG).read_text())
    change(tensors, config)
    (root / name).mkdir()
    save_file(tensors, root / name / WEIGHTS, {"format": "pt"})
    (root / name / CONFIG).write_text(json.dumps(config))


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("mixtral", {"rank_pattern": {r".*\.gate_up_proj": 6}, "alpha_pattern": {"down_proj": 3}}),
        ("qwen3_moe", {"target_parameters": TARGETS[:1]}),
        ("glm4_moe", {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"], "target_parameters": None}),
        ("granitemoe", {"use_rslora": True}),
        ("gpt_oss", {"target_modules": []}),
        ("glm4_moe", {"target_parameters": ["gate_proj.weight", "layers.1.mlp.experts.down_proj"]}),
    ],
)
def test_values_are_pefts(tmp_path: Path, model_type: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    adapted(tmp_path, model_type, dtype, **options)
    files = merged(tmp_path)
    base = weights(tmp_path / "base")
    assert {name: value.shape for name, value in files.items()} == {name: value.shape for name, value in base.items()}
    model = base_in(tmp_path / "merged-adapter", dtype)
    peft = PeftModel.from_pretrained(base_in(tmp_path / "base", dtype), tmp_path / "adapter")
    computed = bounds(peft, dtype)
    assert any(".experts." in name for name in computed)
    expected = peft.merge_and_unload().state_dict()
    for name, value in model.state_dict().items():
        if name in computed:
            assert computed[name].same(value, expected[name]), name
            assert not torch.equal(value, base_in(tmp_path / "base", dtype).state_dict()[name])
        else:
            assert torch.equal(value, expected[name]), name


def as_0_18(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """PEFT 0.18 (tuners/lora/layer.py, ParamWrapper) has A [E * r, m] and B [n, r * E] for a parameter [E, m, n]."""
    del config["peft_version"]
    for layer in range(2):
        for form in (GATE_UP, DOWN):
            names = [form.format(side).replace("layers.0", f"layers.{layer}") for side in "AB"]
            a, b = (tensors[name] for name in names)
            of_a, of_b = a.view(4, -1, a.shape[1]), b.view(b.shape[0], -1, 4)
            tensors[names[0]] = of_b.permute(2, 1, 0).reshape(-1, b.shape[0]).contiguous()
            tensors[names[1]] = of_a.permute(2, 1, 0).reshape(a.shape[1], -1).contiguous()


@pytest.mark.parametrize("version", ["0.17.0", "0.18.1", "0.19.0"])
def test_the_layout_of_older_versions(qwen: Path, version: str) -> None:
    expected = merged(qwen)
    edit(qwen, as_0_18)
    config = json.loads((qwen / "edited" / CONFIG).read_text())
    (qwen / "edited" / CONFIG).write_text(json.dumps(config | {"peft_version": version}))
    found = merged(qwen, "edited")
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)


def test_a_square_parameter_needs_the_version(qwen: Path) -> None:
    edit(qwen, lambda _, config: config.pop("peft_version"))
    with pytest.raises(UserError, match=r"has no peft_version, .*gate_up_proj \[4, 32, 32\]"):
        merged(qwen, "edited")


def test_gpt_oss_is_stored_the_other_way_in_every_version(tmp_path: Path) -> None:
    adapted(tmp_path, "gpt_oss")
    expected = merged(tmp_path)
    edit(tmp_path, lambda _, config: config.pop("peft_version"))
    assert all(torch.equal(value, expected[name]) for name, value in merged(tmp_path, "edited").items())


def lose_a_layer(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
    del tensors[DOWN.format("A")], tensors[DOWN.format("B")]


def lose_a_factor(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
    del tensors[DOWN.format("A")]


def lose_an_expert(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
    tensors[DOWN.format("A")] = tensors[DOWN.format("A")][:12]


def forget_a_target(_: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    config["target_parameters"] = TARGETS[1:]


def add_a_target(_: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    config["target_parameters"] = [*TARGETS, "experts.w1"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose_a_layer, "does not say which parameter|has no factors for model.layers.0.mlp.experts"),
        (lose_a_factor, "has B.weight, not lora_A and lora_B"),
        (
            lose_an_expert,
            r"does not fit the base model at .*down_proj: lora_B \[32, 16\] x lora_A \[12, 16\] of rank 4",
        ),
        (forget_a_target, "does not say which parameter of model.layers.0.mlp.experts"),
        (add_a_target, "target parameter experts.w1 matches nothing"),
    ],
)
def test_what_does_not_fit_is_refused(
    qwen: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None], message: str
) -> None:
    edit(qwen, change)
    with pytest.raises(UserError, match=message):
        merged(qwen, "edited")


@pytest.mark.parametrize("lost", ["layers.0.mlp.experts.2.up_proj", "layers.1.mlp.experts.3"])
def test_a_base_that_lacks_an_expert_is_refused(qwen: Path, lost: str) -> None:
    file = qwen / "base" / "model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if lost not in name}, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"experts\.\w+ is not known|does not fit the base model"):
        merged(qwen)


def test_two_adapters_of_the_same_experts_are_added(qwen: Path) -> None:
    def scaled(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
        tensors |= {name: 2 * value for name, value in tensors.items() if "lora_B" in name}

    edit(qwen, scaled)
    adapters = [WeightedAdapter(qwen / "adapter"), WeightedAdapter(qwen / "edited", 0.5)]
    merge(qwen / "base", adapters, qwen / "both")
    base, once, twice = weights(qwen / "base"), merged(qwen), weights(qwen / "both")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    torch.testing.assert_close(twice[name] - base[name], 2 * (once[name] - base[name]))
