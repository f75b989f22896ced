"""Gated MLPs: the same bits forward, the same gradients, less kept; MLPs of other forms are left alone."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2FN

from hyperpod_ft.engines.torch.model import gated_mlp


def llama(**changes: Any) -> nn.Module:
    values = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    values |= {"num_attention_heads": 2, "num_key_value_heads": 2} | changes
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **values))
    return model


def run(mlp: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Output, gradients, and bytes kept for the backward pass, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in mlp.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = x.clone().requires_grad_()
    mlp.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = mlp(x)
    output.square().sum().backward()
    assert x.grad is not None
    return (
        output.detach(),
        [x.grad, *(p.grad.clone() for p in mlp.parameters() if p.grad is not None)],
        sum(kept.values()),
    )


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_same_results_with_less_kept(activation: str) -> None:
    model = llama(hidden_act=activation).double()
    mlp = model.model.layers[0].mlp
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    output, gradients, kept = run(mlp, x)
    gated_mlp.keep_less(model)
    found, found_gradients, found_kept = run(mlp, x)
    assert torch.equal(found, output)
    for one, other in zip(found_gradients, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert found_kept == kept - 3 * 5 * 24 * 8, "act(gate) is not kept"


class Other(nn.Module):
    """Has the parts, but adds where others multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(4, 4) for _ in range(3))
        self.act_fn = ACT2FN["silu"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))


@pytest.mark.parametrize("changes", [{"act_fn": None}, {"act_fn": ACT2FN["relu"]}])
def test_another_form_is_left_alone(changes: dict[str, Any]) -> None:
    module = Other()
    if changes["act_fn"]:
        module = llama().model.layers[0].mlp
        module.act_fn = changes["act_fn"]
    gated_mlp.keep_less(module)
    assert "forward" not in vars(module)
