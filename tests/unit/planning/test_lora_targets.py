"""Targets of LoRA that are refused on the head node, from the run file and config.json alone."""

from typing import Any

import pytest

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sections.training import Lora
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.lora import check_targets, whole_modules
from hyperpod_ft.planning.model_shape import model_shape
from hyperpod_ft.planning.plan import plan
from tests.unit.tiny_families import SIZES

RUN: dict[str, Any] = {
    "name": "run",
    "engine": "torch",
    "cluster": {"instance_type": "local"},
    "model": {"source": "example:tiny-llama"},
    "dataset": {"source": "rows.jsonl", "format": "text"},
}
EXPERTS = ("mlp.experts.down_proj",)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"target_modules": ()}, "target_modules: names nothing"),
        ({"target_parameters": EXPERTS, "dropout": 0.1}, "dropout: PEFT has none"),
        ({"target_parameters": EXPERTS, "dora": True}, "dora: PEFT has none"),
        ({"target_parameters": EXPERTS, "quantization": "nf4"}, "quantization: keeps no parameters of experts"),
    ],
)
def test_what_adapters_of_experts_exclude(lora: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lora(**lora)


def test_a_dense_model_has_no_experts_to_adapt() -> None:
    shape = model_shape({"model_type": "llama"} | SIZES)
    assert shape is not None
    check_targets(RunConfig.model_validate(RUN), shape)
    config = RunConfig.model_validate(RUN | {"lora": {"target_parameters": EXPERTS}})
    with pytest.raises(UserError, match=r"lora\.target_parameters: 'mlp.experts.down_proj' .*; leave it out"):
        check_targets(config, shape)


def test_an_adapter_of_experts_is_not_deployed_with_its_base() -> None:
    run = RUN | {"engine": "torch", "deploy": {"instance_type": "ml.g6.xlarge", "model": "adapter"}}
    with pytest.raises(ValueError, match=r"deploy\.model: .* adapters of experts; set it to merged"):
        RunConfig.model_validate(run | {"lora": {"target_parameters": EXPERTS}})


@pytest.mark.parametrize("name", ["", "s", "head", "layers"])
def test_whole_modules_have_names_of_their_own(name: str) -> None:
    """PEFT takes any end of a module's path, which `embed_tokens` and `layers` may share."""
    ends = ("model.embed_tokens", "lm_head")
    assert whole_modules(["embed_tokens", "lm_head"], ends, tied=False) == ends
    with pytest.raises(UserError, match="neither the embedding nor the output layer"):
        whole_modules([name], ends, tied=False)


LINEARS = ("q_proj", "v_proj")


@pytest.mark.parametrize(
    ("lora", "trained"),
    [
        ({}, False),
        ({"modules_to_save": ("embed_tokens",)}, False),
        ({"target_modules": (*LINEARS, "model.embed_tokens")}, False),
        ({"modules_to_save": ("embed_tokens", "lm_head")}, True),
        ({"modules_to_save": ("cells", "classes")}, True),
        ({"target_modules": (*LINEARS, "embed_tokens"), "modules_to_save": ("lm_head",)}, True),
        ({"target_modules": (*LINEARS, "model.embed_tokens", "lm_head")}, True),
    ],
    ids=str,
)
def test_rows_of_new_tokens_must_be_trained(lora: dict[str, Any], trained: bool) -> None:
    """In both matrices: otherwise all new tokens would keep the same row."""
    model = RUN["model"] | {"new_tokens": ("<tool>",)}
    values = RUN | {"model": model, "lora": lora, "parallelism": {"ranks_per_node": 1}}
    if trained:
        plan(RunConfig.model_validate(values))
    else:
        with pytest.raises(UserError, match=r"^model\.new_tokens: LoRA trains .*; add lora\.modules_to_save: \["):
            plan(RunConfig.model_validate(values))
    plan(RunConfig.model_validate(values | {"training": {"method": "full"}}))
    values["deploy"] = {"instance_type": "ml.g6.xlarge", "model": "adapter"}
    with pytest.raises(ValueError, match=r"deploy\.model: vLLM .*; set it to merged"):
        RunConfig.model_validate(values)
