"""Section `lora` of a run that continues an adapter is the adapter's."""

from typing import Any

import pytest

from hyperpod_ft.checkpoint.adapters.lora_config import AdapterConfig, in_language_model
from hyperpod_ft.config import run_file
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.continued import continued
from hyperpod_ft.planning.plan import plan

SAVED: dict[str, Any] = {"r": 8, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"], "use_dora": True}


def config(lora: dict[str, Any] | None = None, **adapter: Any) -> RunConfig:
    values: dict[str, Any] = {
        "name": "run",
        "engine": "torch",
        "cluster": {"instance_type": "local"},
        "parallelism": {"ranks_per_node": 1},
        "model": {"source": "org/base", "adapter": {"source": "org/adapter", **adapter}},
        "dataset": {"source": "org/rows", "format": "text"},
        "lora": lora or {},
    }
    return RunConfig.model_validate(values)


def saved(**changes: Any) -> AdapterConfig:
    return AdapterConfig.model_validate(SAVED | changes)


@pytest.mark.parametrize("given", [{}, {"r": 8, "target_modules": ["q_proj", "v_proj"]}, {"r": 16}])
def test_the_adapters_values_are_used(given: dict[str, Any]) -> None:
    found = continued(config(given | {"dropout": 0.1}), saved()).lora
    assert (found.r, found.alpha, found.dora, found.rslora) == (8, 8, True, False)
    assert found.target_modules == ("q_proj", "v_proj") and found.dropout == 0.1
    assert continued(config(given), saved(modules_to_save=["lm_head"])).lora.modules_to_save == ("lm_head",)


@pytest.mark.parametrize(
    "given",
    [{"r": 4}, {"alpha": 16}, {"rslora": True}, {"target_modules": ["q_proj"]}, {"target_parameters": ["experts.x"]}],
    ids=str,
)
def test_other_values_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        continued(config(given), saved())
    (key,) = given
    assert str(caught.value).startswith(f"lora.{key}: ") and "leave it out" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"exclude_modules": ["v_proj"]}, "exclude_modules"),
        ({"bias": "all"}, "bias all"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head\x1b"]}, "names no module"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"target_modules": ".*q_proj"}, "pattern"),
        ({"use_qalora": True}, "use_qalora"),
        ({"target_parameters": ["mlp.experts.down_proj"], "use_dora": False}, "before 0.18"),
        ({"target_modules": ["q_proj", "../../x\n"]}, "names no module"),
    ],
    ids=str,
)
def test_adapters_that_section_lora_cannot_describe_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        continued(config(), saved(**changes))
    message = str(caught.value)
    assert message.startswith("model.adapter.source: ") and said in message and "merge" in message


def test_a_linear_layer_beside_experts_is_a_target_again() -> None:
    """PEFT needs its weight's name; see engines/torch/lora/adapters.py."""
    parameters = ["mlp.experts.down_proj", "mlp.shared.up_proj.weight"]
    adapter = saved(target_parameters=parameters, use_dora=False, peft_version="0.21.2")
    found = continued(config(), adapter).lora
    assert found.target_modules == ("mlp.shared.up_proj", "q_proj", "v_proj")
    assert found.target_parameters == ("mlp.experts.down_proj",)


def test_the_targets_of_an_image_text_model_are_names_again() -> None:
    names = ("q_proj", "self_attn.v_proj")
    assert continued(config(), saved(target_modules=in_language_model(names))).lora.target_modules == names
    with pytest.raises(UserError, match="pattern"):
        continued(config(), saved(target_modules=in_language_model(["q_proj"]) + "|.*vision.*"))


def test_the_run_is_the_same_before_and_after_the_adapter_is_known() -> None:
    unknown = config()
    known = continued(unknown, saved())
    assert known != unknown and plan(known) == plan(unknown)
    assert plan(continued(known, saved())) == plan(unknown)
    assert plan(config(revision="v2")).run_id != plan(unknown).run_id
    assert plan(config({"dropout": 0.1})).run_id != plan(unknown).run_id


def test_full_fine_tuning_continues_no_adapter() -> None:
    values = config().model_dump() | {"training": {"method": "full"}}
    with pytest.raises(ValueError, match=r"model\.adapter: .*merge it"):
        RunConfig.model_validate(values)


def test_a_path_alone_is_answered_with_how_to_write_it() -> None:
    values = config().model_dump(mode="json", exclude_unset=True) | {"model": {"source": "a/b", "adapter": "./saved"}}
    with pytest.raises(UserError, match=r"model\.adapter: write \{source: \./saved\}"):
        run_file.validate(values, "run.yaml")
