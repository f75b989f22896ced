"""Adapters of experts' parameters: logits and gradients are PEFT's, and no sum of weight and update is kept."""

import warnings
import weakref
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hyperpod_ft.config.sections.training import Lora
from hyperpod_ft.engines.torch.lora import experts
from hyperpod_ft.engines.torch.lora.adapters import adapt
from hyperpod_ft.engines.torch.model import activations
from tests.unit.tiny_families import MIXTURES, SIZES

IDS = torch.arange(24).reshape(2, 12)
TARGETS = ("experts.gate_up_proj", "experts.down_proj")


def mixture(model_type: str, implementation: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES | MIXTURES[model_type])
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, experts_implementation=implementation)
    return model


def adapted(model: PreTrainedModel, **lora: Any) -> PreTrainedModel:
    adapt(model, Lora(r=3, alpha=6, target_modules=(), target_parameters=TARGETS, **lora), seed=0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return model


def gradients(model: torch.nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logits = model(IDS).logits
    logits.square().mean().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    return logits.detach(), {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("rslora", [False, True])
def test_logits_and_gradients_are_those_of_peft(model_type: str, implementation: str, rslora: bool) -> None:
    ours = adapted(mixture(model_type, implementation), rslora=rslora)
    config = LoraConfig(
        r=3, lora_alpha=6, target_modules=[], target_parameters=list(TARGETS), use_rslora=rslora, task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = get_peft_model(mixture(model_type, implementation), config)
    own = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(own[_ours(name)])
    logits, found = gradients(ours)
    expected_logits, expected = gradients(theirs)
    torch.testing.assert_close(logits, expected_logits)
    assert found.keys() == {_ours(name) for name in expected}
    for name, gradient in expected.items():
        torch.testing.assert_close(found[_ours(name)], gradient, rtol=1e-4, atol=1e-8)


def _ours(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".default.", ".")


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_updated_weights_are_not_kept_for_the_backward_pass(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[weakref.ref[torch.Tensor]] = []
    updated = experts._AdaptedForward.updated

    def noted(self: Any, name: str) -> torch.Tensor:
        result = updated(self, name)
        computed.append(weakref.ref(result))
        return result

    monkeypatch.setattr(experts._AdaptedForward, "updated", noted)
    model = adapted(mixture("qwen3_moe", implementation))
    logits = model(IDS).logits
    assert len(computed) == 4 and not any(reference() is not None for reference in computed), "of two layers"
    logits.square().mean().backward()
    # once more each, but not for the input of the first, which is trained by nothing
    assert len(computed) == 7 and not any(reference() is not None for reference in computed)


def test_updated_weights_are_not_moved_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """All else is, and comes back."""
    _, expected = gradients(adapted(mixture("qwen3_moe", "grouped_mm")))
    moved: list[int] = []
    take = activations._ActivationStore.take

    def noted(self: Any, source: torch.Tensor) -> Any:
        moved.append(source.nbytes)
        return take(self, source)

    monkeypatch.setattr(activations._ActivationStore, "take", noted)
    model = adapted(mixture("qwen3_moe", "grouped_mm"))
    activations.offload_layers(list(model.get_submodule("model.layers").children()), torch.device("cpu"), at_least=0)
    _, found = gradients(model)
    assert moved and not {4 * 32 * 32 * 4, 4 * 32 * 16 * 4} & set(moved), "bytes of an updated parameter"
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_an_error_in_the_module_leaves_its_parameters() -> None:
    model = adapted(mixture("qwen3_moe", "eager"))
    module = model.get_submodule("model.layers.0.mlp.experts")
    with pytest.raises(TypeError):
        module()
    assert module.get_parameter("down_proj") is module.down_proj
