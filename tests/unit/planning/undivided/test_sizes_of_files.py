"""The parameters of models on disk, compared with those of transformers' classes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hyperpod_ft.checkpoint.formats.pretrained import auto_class
from hyperpod_ft.engines.torch.loading import skeleton
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.model_fit import TrainingFit, check_model_directory, shape_of
from hyperpod_ft.planning.parallelism import degrees_of
from hyperpod_ft.planning.undivided.files import files_shape
from hyperpod_ft.planning.undivided.shape import UndividedShape
from tests.conftest import MakeRun
from tests.unit import tiny_image_text
from tests.unit.tiny_families import FILE, MIXTURES, SIZES

_JAMBA = {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
TYPES: dict[str, dict[str, Any]] = {
    **MIXTURES,
    "jamba": _JAMBA | {"num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1},
    "mamba": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "starcoder2": {},
    "afmoe": {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1, "moe_intermediate_size": 16},
}
P5: dict[str, Any] = {"engine": "torch", "cluster__instance_type": "p5.48xlarge", "training__method": "full"}
P5 |= {"parallelism": {"ranks_per_node": 8}}


def saved(directory: Path, model_type: str) -> int:
    """Write a model; returns its parameters, but for corrections of a router, which no training changes."""
    config = AutoConfig.for_model(model_type, **SIZES | TYPES[model_type])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    return sum(parameter.numel() for name, parameter in model.named_parameters() if "bias_correction" not in name)


def shape_in(directory: Path) -> UndividedShape:
    shape = files_shape(directory, json.loads((directory / "config.json").read_text()))
    assert shape is not None
    return shape


@pytest.mark.parametrize("model_type", TYPES)
def test_parameters_are_counted(tmp_path: Path, model_type: str) -> None:
    expected = saved(tmp_path, model_type)
    shape = shape_in(tmp_path)
    # a correction for each expert is a parameter of some classes and a buffer of others
    assert shape.parameters == pytest.approx(expected, abs=2 * 4)
    if of_config := shape_of(json.loads((tmp_path / "config.json").read_text())):
        assert isinstance(of_config, UndividedShape)
        assert shape.expert_parameters == of_config.expert_parameters
        assert shape.active_parameters == pytest.approx(of_config.active_parameters, abs=2 * 4)
    else:
        assert (shape.experts > 0) == (0 < shape.expert_parameters < shape.parameters)


@pytest.mark.parametrize("model_type", tiny_image_text.TYPES)
def test_of_an_image_text_model_the_language_model_is_counted(tmp_path: Path, model_type: str) -> None:
    config = tiny_image_text.config_of(model_type)
    model = auto_class(config.to_dict()).from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    language = skeleton.build(tmp_path, torch.bfloat16, None)
    # a scalar of each layer of gemma4 is a buffer
    assert shape_in(tmp_path).parameters == pytest.approx(sum(each.numel() for each in language.parameters()), abs=2)


def fit_of(make_run: MakeRun, directory: Path, **overrides: Any) -> TrainingFit:
    config = make_run(**P5 | overrides).config
    return check_model_directory(config, degrees_of(config), directory)


def test_what_is_not_known_is_said(make_run: MakeRun, tmp_path: Path) -> None:
    parameters = saved(tmp_path, "jamba")
    fit = fit_of(make_run, tmp_path)
    assert fit.memory is not None and "jamba" in fit.unknown and "at least" in fit.unknown
    # fp32 weights and moments of each rank's share, as for a model of unknown size
    assert fit.layout.sharding.mode == "zero3"
    assert fit.memory.optimizer == pytest.approx(8 * parameters / 8, rel=0.01)
    (tmp_path / FILE).unlink()
    fit = fit_of(make_run, tmp_path)
    assert fit.memory is None and "jamba" in fit.unknown and "download" in fit.unknown
    assert fit_of(make_run, tmp_path, cluster__instance_type="local").unknown == ""


def test_what_cannot_be_counted_has_no_shape(tmp_path: Path) -> None:
    saved(tmp_path, "bloom")
    assert files_shape(tmp_path, {"model_type": "bloom"}) is None, "the number of layers is unknown"
    packed = {"n_layer": 2, "quantization_config": {"quant_method": "mxfp4"}}
    assert files_shape(tmp_path, packed) is None, "stage download decodes it"


def test_a_mixture_that_does_not_fit_is_refused_with_what_would(make_run: MakeRun, tmp_path: Path) -> None:
    values = {"model_type": "mixtral", **SIZES, **MIXTURES["mixtral"], "num_hidden_layers": 32}
    values |= {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="method full: needs") as refused:
        fit_of(make_run, tmp_path)
    assert "tensor_parallel" not in str(refused.value.remedy)
    fit = fit_of(make_run, tmp_path, training__method="lora", training__activation_checkpointing="full")
    assert fit.memory is not None and fit.unknown == ""
