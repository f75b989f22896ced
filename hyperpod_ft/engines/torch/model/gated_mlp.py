"""MLPs that keep less for the backward pass: the gated one of most families, and GPT-2's activation.

A gated MLP, down(act(gate(x)) * up(x)), does not keep act(gate(x)). `gelu_new` of GPT-2 and GPT-J, which transformers
writes as six operations that each keep a tensor, is torch's gelu with `approximate="tanh"`.
"""

import copy
from typing import Any

import torch
from torch import nn
from transformers.activations import NewGELUActivation

_GELU_TANH = "tanh"


def keep_less(model: nn.Module) -> None:
    """Replace the forward pass of a model's gated MLPs and of `gelu_new`, in place; others stay as they are.

    Works on the meta device.

    An MLP is gated if it has the four parts by their usual names, an activation known here, and with simple parts
    in place of its own gives the result of the formula above.
    """
    for module in model.modules():
        if isinstance(module, NewGELUActivation):
            module.forward = _gelu_tanh  # type: ignore[method-assign,assignment]
        if all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
            activation = _activation(module.act_fn)
            if activation and _is_formula(module):
                module.forward = _Forward(module, activation)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.gelu(x, approximate=_GELU_TANH)


class _Forward:
    def __init__(self, module: Any, activation: str) -> None:
        self._module, self._activation = module, activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        module = self._module
        gated: torch.Tensor = _Gated.apply(module.gate_proj(x), module.up_proj(x), self._activation)  # type: ignore[no-untyped-call]
        down: torch.Tensor = module.down_proj(gated)
        return down


class _Gated(torch.autograd.Function):
    """act(gate) * up, elementwise; keeps gate and up alone."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _activated(gate, activation).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gate, up = ctx.saved_tensors
        of_up = _activated(gate, ctx.activation).mul_(gradient)
        of_activated = gradient * up
        if ctx.activation == _GELU_TANH:
            of_gate = torch.ops.aten.gelu_backward(of_activated, gate, approximate=_GELU_TANH)
        else:
            of_gate = torch.ops.aten.silu_backward(of_activated, gate)
        return of_gate, of_up, None


def _activated(gate: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == _GELU_TANH:
        return _gelu_tanh(gate)
    return nn.functional.silu(gate)


def _activation(module: Any) -> str | None:
    """Which known activation a module computes, by its values; None for another."""
    x = torch.linspace(-6, 6, 97, dtype=torch.float64)
    try:
        found = module(x)
    except (RuntimeError, TypeError):  # it is on the meta device, or takes something else
        return None
    return next((name for name in ("silu", _GELU_TANH) if torch.allclose(found, _activated(x, name), atol=1e-9)), None)


class _Affine(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._factor * x + 1


def _is_formula(module: Any) -> bool:
    parts = {"gate_proj": _Affine(2.0), "up_proj": _Affine(-3.0), "down_proj": _Affine(5.0)}
    probe = copy.copy(module)
    probe._modules = module._modules | parts
    x = torch.linspace(-2, 2, 11)
    try:
        found = type(module).forward(probe, x)
    except (AttributeError, RuntimeError, TypeError):
        return False
    expected = parts["down_proj"](module.act_fn(parts["gate_proj"](x)) * parts["up_proj"](x))
    return isinstance(found, torch.Tensor) and torch.equal(found, expected)
