"""The table of families against transformers' own classes."""

import json

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sections.training import Lora
from hyperpod_ft.engines.torch.lora.adapters import adapt, is_adapted
from hyperpod_ft.engines.torch.model import tensor_parallel
from hyperpod_ft.planning.families import CAUSAL_IMAGE_TEXT, FAMILIES, family_of
from hyperpod_ft.planning.layout import Degrees
from hyperpod_ft.planning.model_shape import model_shape
from hyperpod_ft.planning.torch.step_memory import memory_of
from tests.unit.tiny_families import SIZES

RUN = {
    "name": "run",
    "engine": "torch",
    "cluster": {"instance_type": "local"},
    "model": {"source": "example:tiny-llama"},
    "dataset": {"source": "example:qa", "format": "text"},
    "training": {"method": "full"},
}

TYPES = [model_type for family in FAMILIES for model_type in family.model_types]


def empty_model(model_type: str) -> PreTrainedModel:
    # their queries, keys and values have as many heads
    same = {"num_key_value_heads": None} if model_type.startswith("gpt") else {}
    same |= {"num_key_value_heads": 4} if model_type == "phi3" else {}
    own = {"rotary_dim": 4} if model_type == "gptj" else {}
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            AutoConfig.for_model(model_type, **SIZES | same | own)
        )
    return model


@pytest.mark.parametrize("model_type", TYPES)
def test_every_parameter_has_its_place(model_type: str) -> None:
    """Each path exists, and what remains are vectors: norms, which are not divided."""
    model, family = empty_model(model_type), family_of(model_type)
    assert family is not None
    assert model.get_submodule(family.embedding) is model.get_input_embeddings()
    assert model.get_submodule(family.head) is model.get_output_embeddings()  # type: ignore[no-untyped-call]
    layers = model.get_submodule(family.layers)
    ends = {family.embedding, family.head, family.last_norm, *([family.positions] if family.positions else [])}
    divided = {*family.columns, *family.rows}
    assert {path.partition(".")[0] for path in divided} == {family.attention, family.mlp}
    for name, parameter in model.named_parameters():
        if name.startswith(f"{family.layers}."):
            path = name.removeprefix(f"{family.layers}.").partition(".")[2].rpartition(".")[0]
            assert path in divided or parameter.ndim == 1, name
            if path not in divided and path.startswith((family.attention, family.mlp)):
                assert path in (f"{family.attention}.q_norm", f"{family.attention}.k_norm")
                size = parameter.numel()
                assert family.head_norms == ("each" if size == SIZES["head_dim"] else "all"), name
        else:
            assert name.rpartition(".")[0] in ends, name
    for path in divided:
        assert isinstance(layers[0].get_submodule(path), torch.nn.Module)  # type: ignore[index]


@pytest.mark.parametrize("model_type", TYPES)
def test_all_linears_of_a_layer_get_adapters(model_type: str) -> None:
    """Unless the run file names others; the targets of a run file are checked against these paths."""
    model = empty_model(model_type)
    shape = model_shape(json.loads(model.config.to_json_string(use_diff=False)))
    assert shape is not None
    kinds = torch.nn.Linear, Conv1D, torch.nn.Embedding
    assert set(shape.modules) == {name for name, module in model.named_modules() if isinstance(module, kinds)}
    adapt(model, Lora(r=2), seed=0)
    adapted = {name for name, module in model.named_modules() if is_adapted(module)}
    assert adapted == {path for path in shape.modules if path.startswith(f"{shape.family.layers}.")}


@pytest.mark.parametrize("model_type", TYPES)
def test_attributes_that_count_heads_exist(model_type: str) -> None:
    model, family = empty_model(model_type), family_of(model_type)
    assert family is not None
    attention = model.get_submodule(f"{family.layers}.0.{family.attention}")
    for path in (*family.query_attributes, *family.key_attributes):
        owner, _, name = path.rpartition(".")
        value = getattr(getattr(attention, owner) if owner else attention, name)
        assert value % (SIZES["num_key_value_heads"] if path in family.key_attributes else 4) == 0


@pytest.mark.parametrize("model_type", TYPES)
def test_parameters_are_counted(model_type: str) -> None:
    """In the whole model, and on one of four tensor-parallel ranks."""
    model, family = empty_model(model_type), family_of(model_type)
    shape = model_shape(json.loads(model.config.to_json_string(use_diff=False)))
    assert family is not None and shape is not None
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        tensor_parallel.parallelize(model, family, mesh, sequence_parallel=True)
    finally:
        dist.destroy_process_group()
    config = RunConfig.model_validate(RUN)
    (stage,) = memory_of(config, Degrees(1, 4, 4, 1), shape).stages
    # parts of the norms of all heads are counted whole
    assert stage.parameters == pytest.approx(sum(parameter.numel() for parameter in model.parameters()), rel=0.03)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "opt", ""])
def test_others_have_no_row(model_type: str) -> None:
    assert family_of(model_type) is None


def test_the_image_text_models_that_load_as_causal_ones() -> None:
    both = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys() & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    nested = {model_type for model_type in both if "text_config" in CONFIG_MAPPING[model_type].sub_configs}
    assert nested == CAUSAL_IMAGE_TEXT
