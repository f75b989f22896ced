"""How far a merged weight may be from the exact one, and so from PEFT's: what floating-point rounding makes, no more.

Merging computes in fp32, or in fp64 for a weight in fp64. The bounds hold for every order of summation (Higham,
Accuracy and Stability of Numerical Algorithms, 2nd edition, section 3.1), and so on every processor.
"""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from peft.tuners.lora import Embedding, LoraLayer
from peft.tuners.lora.layer import ParamWrapper

Values = NDArray[np.floating[Any]]  # float64 or longer


def unit(dtype: torch.dtype) -> float:
    """The unit roundoff."""
    return torch.finfo(dtype).eps / 2


def gamma(roundings: int, dtype: torch.dtype) -> float:
    """The relative error of so many roundings one after another."""
    total = roundings * unit(dtype)
    return total / (1 - total)


def half_spacing(values: Values, dtype: torch.dtype) -> Values:
    """The error of rounding values of up to this size to `dtype`."""
    info = torch.finfo(dtype)
    _, exponents = np.frexp(values)
    spacing = np.maximum(np.ldexp(np.ones_like(values), exponents - 1), info.smallest_normal) * info.eps
    return np.asarray(spacing / 2)


@dataclass
class Bound:
    """A weight before its last rounding: what it is exactly, and how far a computed one may be from it."""

    exact: Values
    error: Values

    @classmethod
    def of_sum(
        cls,
        weight: Values,
        delta: Values,
        magnitude: Values,
        rank: int,
        *,
        arithmetic: torch.dtype = torch.float32,
        delta_rounded_to: torch.dtype | None = None,
    ) -> "Bound":
        """Of weight + delta, delta being scale * (B @ A) and `magnitude` |scale| * (|B| @ |A|)."""
        # a product, its additions, the scale and the multiplication by it; products may underflow
        error = gamma(rank + 2, arithmetic) * magnitude + (rank + 2) * torch.finfo(arithmetic).smallest_normal
        if delta_rounded_to:
            error = error + half_spacing(abs(delta) + error, delta_rounded_to)
        exact = weight + delta
        return cls(exact, error + unit(arithmetic) * (abs(exact) + error))

    def rescaled(self, magnitude: Values, axis: int, arithmetic: torch.dtype = torch.float32) -> "Bound":
        """By DoRA, with the norm along `axis` replaced by `magnitude`."""
        norm = np.sqrt((self.exact**2).sum(axis, keepdims=True))
        of_norm = np.sqrt((self.error**2).sum(axis, keepdims=True)) / norm
        factor = np.expand_dims(magnitude, axis) / norm
        exact = self.exact * factor
        # squares and their sum, the root, the division and the multiplication; 1% for products of errors
        of_rescaling = of_norm + gamma(self.exact.shape[axis] + 4, arithmetic)
        return Bound(exact, (self.error * abs(factor) + abs(exact) * of_rescaling) * 1.01)

    def allowed(self, dtype: torch.dtype) -> Values:
        """How far the result may be from the exact one when it is rounded once to `dtype`."""
        return self.error + half_spacing(abs(self.exact) + self.error, dtype)

    def holds(self, value: torch.Tensor) -> bool:
        return bool((abs(wide(value) - self.exact) <= self.allowed(value.dtype)).all())

    def same(self, value: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether both are right, and differ by no more than one unit in the last place and both sums' errors."""
        if value.dtype != expected.dtype or value.shape != expected.shape or not self.holds(value):
            return False
        return bool((abs(wide(value) - wide(expected)) <= 2 * self.allowed(value.dtype)).all())


def wide(value: torch.Tensor) -> Values:
    return value.double().numpy()


def bounds(model: PeftModel, dtype: torch.dtype, adapter: str = "default", more: int = 0) -> dict[str, Bound]:
    """Of every weight that an adapter changes, by name; `more`: further roundings of the factors. Before merging."""
    found = {}
    for name, module in model.base_model.model.named_modules():
        if not isinstance(module, LoraLayer) or adapter not in module.r:
            continue
        if isinstance(module, ParamWrapper):
            experts = name.replace(".base_layer", "")
            found[f"{experts}.{module.parameter_name}"] = _of_parameter(module, dtype, adapter, more)
            continue
        layer: Any = copy.deepcopy(module).double()
        base, is_embedding = layer.get_base_layer(), isinstance(layer, Embedding)
        uses_dora = adapter in layer.lora_magnitude_vector
        with torch.no_grad():
            delta = wide(layer.get_delta_weight(adapter))
            if not is_embedding and layer.lora_B[adapter].bias is not None:
                update = wide(layer.lora_B[adapter].bias * layer.scaling[adapter])
                found[f"{name}.bias"] = Bound.of_sum(wide(base.bias.data), update, abs(update), 1 + more)
            for factors in (layer.lora_A, layer.lora_B, layer.lora_embedding_A, layer.lora_embedding_B):
                for parameter in factors.parameters():
                    parameter.data.abs_()
            magnitude = abs(wide(layer.get_delta_weight(adapter)))
        bound = Bound.of_sum(
            wide(base.weight.data),
            delta,
            magnitude,
            layer.r[adapter] + more,
            delta_rounded_to=dtype if is_embedding and not uses_dora else None,
        )
        if uses_dora:
            transposed = is_embedding or layer.fan_in_fan_out
            norms = wide(layer.lora_magnitude_vector[adapter].weight.data)
            bound = bound.rescaled(norms, 0 if transposed else 1)
        found[f"{name}.weight"] = bound
    return found


@torch.no_grad()
def _of_parameter(module: ParamWrapper, dtype: torch.dtype, adapter: str, more: int) -> Bound:
    """Of a parameter of all experts, whose update PEFT rounds before it is added."""
    layer: Any = copy.deepcopy(module).double()
    weight, delta = (wide(value) for value in (layer.get_param().data, layer.get_delta_weight(adapter)))
    for factors in (layer.lora_A, layer.lora_B):
        for parameter in factors.parameters():
            parameter.data.abs_()
    magnitude = abs(wide(layer.get_delta_weight(adapter)))
    return Bound.of_sum(weight, delta, magnitude, layer.r[adapter] + more, delta_rounded_to=dtype)
